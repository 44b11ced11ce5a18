"""The ChunkReader on Jackal: what the chain lists of a chunk, and its bytes from providers.

It has no wallet.

Source: docs/explanation/jackal.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.download import Downloads
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline.store.jackal.provider_selection import ProviderSelection
from caf_pipeline.store.jackal.reader_memory import ReaderHeights, ReaderRecords
from caf_pipeline.store.protocol import (
    ChainHeights,
    Copy,
    PostRecord,
    ProviderRecord,
    ProviderRecords,
)
from caf_pipeline.waits import Waits


class JackalReader:
    """Reads chunks that are kept on Jackal. Safe for several threads.

    Attributes:
        chain: the network's nodes.
        settings: of the network.
    """

    name = "jackal"

    def __init__(
        self,
        settings: JackalSettings,
        chain: Chain,
        records: ProviderRecords,
        waits: Waits | None = None,
    ) -> None:
        self.settings = settings
        self.chain = chain
        self.required_copies = settings.copies_required
        self._selection = ProviderSelection(
            chain, records, allow_private_addresses=settings.allow_private_addresses
        )
        self._downloads = Downloads(chain, records, self._selection, waits)

    def close(self) -> None:
        """Close all connections."""
        self._selection.close()
        self.chain.close()

    def copies(self, posting: PostRecord) -> Sequence[Copy]:
        """Return what the chain lists, with what it keeps of each copy's proofs."""
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

    def holders(self, posting: PostRecord) -> Sequence[str]:
        """Return the providers that the chain lists, fastest first, those that failed of late
        last.
        """
        return self._downloads.holders(posting)

    def urls(self, posting: PostRecord) -> Mapping[str, str]:
        """Return where providers give the file to whoever asks, by the address of each on the
        chain.
        """
        return self._downloads.urls(posting)

    def read(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str | None = None
    ) -> Iterator[bytes]:
        """Yield a range of the stored bytes: see `ChunkReader.read`."""
        return self._downloads.read(posting, start_byte, end_byte, provider=provider)

    def has_lost(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str
    ) -> bool:
        """Return whether a provider that answers sends nothing of a range: see
        `ChunkReader.has_lost`.
        """
        return self._downloads.has_lost(posting, start_byte, end_byte, provider=provider)


def open_chain(
    settings: JackalSettings, heights: ChainHeights, waits: Waits | None = None
) -> Chain:
    """Open the network's nodes; no request is sent yet.

    Raises:
        SettingsError: no LCD is set.
    """
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
    """Open what reads the chunks of a network, and writes neither heights nor records.

    Args: settings: of the network. recorded_height: returns the greatest height that the ledger has
        of a chain, 0 if it has none. recorded_providers: returns what the ledger has of providers,
        by provider. waits: says what is waited for.

    Raises:
        SettingsError: no LCD is set.
    """
    chain = open_chain(settings, ReaderHeights(recorded_height), waits)
    return JackalReader(settings, chain, ReaderRecords(recorded_providers), waits)
