"""The store on a loopback network, with records and orders that a test can read and set."""

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from caf_pipeline import wiring
from caf_pipeline.ledger.records import OperatorControls
from caf_pipeline.records import PostRecord, ProviderRecord
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline.store.jackal.posting import Poster
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline.store.jackal.write import JackalStore
from caf_pipeline.throttle import Throttle
from caf_pipeline_tests.contracts.chunk_store import to_store
from caf_pipeline_tests.support.jackal_network import WORDS, jackal_settings
from caf_pipeline_tests.support.memory_log import MemoryLog


class MemoryRecords:
    """Provider records in memory. The last rate counts."""

    def __init__(self):
        self.known = {}

    def all(self):
        return dict(self.known)

    def set(self, provider, **changes):
        self.known[provider] = replace(
            self.known.get(provider) or ProviderRecord(provider, None, None, 0, None), **changes
        )

    def uploaded(self, provider, size_bytes, seconds):
        self.set(provider, upload_rate=size_bytes / seconds, failures=0)

    def downloaded(self, provider, size_bytes, seconds):
        self.set(provider, download_rate=size_bytes / seconds, failures=0)

    def failed(self, provider):
        before = self.known.get(provider)
        self.set(
            provider, failures=(before.failures if before else 0) + 1, failed_at=datetime.now(UTC)
        )


@dataclass
class Board:
    """Controls."""

    controls: OperatorControls = field(default_factory=OperatorControls)

    def current(self):
        return self.controls


@dataclass
class Opened:
    """A store and its parts."""

    store: JackalStore
    network: object
    log: MemoryLog
    records: MemoryRecords
    board: Board
    throttle: Throttle

    def pause(self) -> None:
        """Order a pause, and return when it takes effect."""
        self.board.controls = OperatorControls(paused="maintenance")
        while not self.throttle.paused():
            time.sleep(0.1)

    def posted(self, path) -> PostRecord:
        return self.store.post(to_store(self.store, path), self.log)

    def stored(self, path) -> PostRecord:
        posting = self.posted(path)
        self.store.put(posting, path, lambda _: None)
        return posting

    def providers_of(self, posting) -> set[int]:
        """Return the numbers of the listed providers."""
        listed = {copy.provider for copy in self.store.copies(posting)}
        return {
            number
            for number, provider in enumerate(self.network.provider_addresses)
            if provider in listed
        }

    def begun(self) -> Counter:
        """Return how many uploads each provider has ever begun."""
        return Counter(
            {
                number: provider["uploads_begun"]
                for number, provider in enumerate(self.network.state()["providers"])
            }
        )

    def downloads(self) -> Counter:
        return Counter(
            {
                number: provider["downloads"]
                for number, provider in enumerate(self.network.state()["providers"])
            }
        )


def store_once(network, path) -> tuple[PostRecord, list[int]]:
    """Store a file with a temporary store.

    Returns its posting and the sorted numbers of its providers.
    """
    opened = open_store(network)
    posting = opened.stored(path)
    providers = sorted(opened.providers_of(posting))
    opened.store.close()
    return posting, providers


def open_store(network, log=None, *, words=WORDS, records=None, **changes) -> Opened:
    """Open a store on the network with changed settings."""
    settings = jackal_settings(network, **changes)
    log, records, board = log or MemoryLog(), records or MemoryRecords(), Board()
    wallet = Wallet(words)
    throttle = Throttle(board.current, bandwidth=settings.bandwidth, spend_cap=settings.spend_cap)
    chain = Chain(
        Nodes(
            settings.lcd,
            settings.chain_id,
            seen_height=lambda: log.seen_height(settings.chain_id),
            see_height=lambda height: log.see_height(settings.chain_id, height),
            attempts=2,
            first_wait_seconds=0.1,
        )
    )
    poster = Poster(chain, wallet, settings, spend_cap=throttle.spend_cap)
    return Opened(
        JackalStore(settings, wallet, chain, poster, log, records, throttle),
        network,
        log,
        records,
        board,
        throttle,
    )


def open_jackal_store(settings, ledger, holder, waits=None) -> JackalStore:
    """Open the Jackal store, whichever store the settings name."""
    kept = settings.store.model_copy(update={"kind": "jackal"})
    return wiring.open_jackal(settings.model_copy(update={"store": kept}), ledger, holder, waits)
