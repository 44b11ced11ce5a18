"""The ChunkReader on Jackal: the chain's list of copies, and bytes from providers. No wallet."""

from collections.abc import Callable, Mapping, Sequence

from caf_pipeline.records import ChainHeights, Copy, PostRecord, ProviderRecord, ProviderRecords
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.download import Downloads
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline.store.jackal.provider_selection import ProviderSelection
from caf_pipeline.store.jackal.reader_memory import ReaderHeights, ReaderRecords
from caf_pipeline.waits import Waits


class JackalReader(Downloads):
    """Reads chunks on Jackal. Safe for several threads."""

    name = "jackal"

    def __init__(
        self,
        settings: JackalSettings,
        chain: Chain,
        records: ProviderRecords,
        waits: Waits | None = None,
    ) -> None:
        self.settings = settings
        self.required_copies = settings.copies_required
        selection = ProviderSelection(
            chain, records, allow_private_addresses=settings.allow_private_addresses
        )
        super().__init__(chain, records, selection, waits)

    def close(self) -> None:
        self._selection.close()
        self.chain.close()

    def copies(self, posting: PostRecord) -> Sequence[Copy]:
        merkle_root, owner, start = posting.merkle_root, posting.owner, posting.start
        file = self.chain.file(merkle_root, owner, start)
        if file is None:
            return []
        copies = []
        for provider, listed in zip(file.providers, file.proofs, strict=True):
            proof = self.chain.proof(provider, merkle_root, owner, start)
            height, verified = (proof.last_proven, proof.verified) if proof else (None, False)
            copies.append(Copy(provider, listed, height, verified))
        return copies


def open_chain(
    settings: JackalSettings, heights: ChainHeights, waits: Waits | None = None
) -> Chain:
    """Open the network's chain. Sends no request. Raises SettingsError if no LCD is set."""
    return Chain(
        Nodes(
            settings.lcd,
            settings.chain_id,
            seen_height=lambda: heights.seen_height(settings.chain_id),
            see_height=lambda height: heights.see_height(settings.chain_id, height),
            waits=waits,
        )
    )


def open_jackal_reader(
    settings: JackalSettings,
    recorded_height: Callable[[str], int],
    recorded_providers: Callable[[], Mapping[str, ProviderRecord]],
    waits: Waits | None = None,
) -> JackalReader:
    """Open a reader that writes neither heights nor records. Raises like `open_chain`."""
    chain = open_chain(settings, ReaderHeights(recorded_height), waits)
    return JackalReader(settings, chain, ReaderRecords(recorded_providers), waits)
