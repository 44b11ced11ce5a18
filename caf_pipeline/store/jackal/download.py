"""Reads stored bytes from the providers that hold them: the fastest first, the next one where it
fails.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from caf_pipeline.errors import CafError, IntegrityError, StoredChunkMissing, StoreUnreachable
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.provider_selection import ProviderSelection
from caf_pipeline.store.protocol import PostRecord, ProviderRecords
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

HOLDERS_SECONDS: Final = 60.0
"""How old the chain's word on who holds a file may be: thousands of objects are read from one chunk
in a row.
"""

MAX_REMEMBERED: Final = 4096

MEASURED_FROM_BYTES: Final = 4 << 20
"""A shorter read tells of the way there and back, not of a rate."""


class Downloads:
    """Reads posted files. Safe for several threads."""

    def __init__(
        self,
        chain: Chain,
        records: ProviderRecords,
        selection: ProviderSelection,
        waits: Waits | None = None,
    ) -> None:
        self._chain = chain
        self._records = records
        self._selection = selection
        self._waits = waits or Waits()
        self._lock = threading.Lock()
        self._remembered: OrderedDict[tuple[bytes, str, int], tuple[float, Sequence[str]]] = (
            OrderedDict()
        )

    def holders(self, posting: PostRecord) -> Sequence[str]:
        """Return the providers that the chain lists, the best first; as last known while no chain
        node answers.
        """
        return self._selection.to_read(self._holders(posting))

    def urls(self, posting: PostRecord) -> Mapping[str, str]:
        """See `ChunkStore.urls`."""
        clients = {address: self._selection.client(address) for address in self.holders(posting)}
        return {
            address: client.download_url(posting) for address, client in clients.items() if client
        }

    def read(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str | None = None
    ) -> Iterator[bytes]:
        """See `ChunkStore.read`."""
        if end_byte > posting.stored_size_bytes:
            raise IntegrityError(
                f"file {posting.merkle_root.hex()} has {posting.stored_size_bytes} bytes and ends "
                f"before byte {end_byte}"
            )
        position, errors = start_byte, list[CafError]()
        for address in [provider] if provider else self._candidates(posting):
            if position >= end_byte:
                return
            try:
                for piece in self._from_one(address, posting, position, end_byte):
                    position += len(piece)
                    yield piece
            except (StoreUnreachable, StoredChunkMissing, IntegrityError) as error:
                self._records.failed(address)
                errors.append(error)
        if position < end_byte:
            raise _worst(posting, errors)

    def has_lost(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str
    ) -> bool:
        """See `ChunkStore.has_lost`."""
        try:
            client = self._selection.client(provider)
        except StoreUnreachable:
            return False
        if client is None:
            return False
        with self._waits.waiting(
            f"provider {client.url}, which gave nothing of a range and is asked again",
            ends_by="the range, or its time limit ends it",
            grace=UNANSWERED_SECONDS,
        ):
            return client.has_lost(posting, start_byte, end_byte)

    def _from_one(
        self, address: str, posting: PostRecord, start_byte: int, end_byte: int
    ) -> Iterator[bytes]:
        client = self._selection.client(address)
        if client is None:
            raise StoreUnreachable(f"provider {address} has no usable address")
        waited = 0.0
        asked = time.monotonic()
        pieces = iter(client.download(posting, start_byte, end_byte))
        while (piece := self._next(pieces, client.url)) is not None:
            waited += time.monotonic() - asked
            yield piece
            asked = time.monotonic()  # what is done with a piece is not the provider's time
        if end_byte - start_byte >= MEASURED_FROM_BYTES and waited > 0:
            self._records.downloaded(address, end_byte - start_byte, waited)

    def _next(self, pieces: Iterator[bytes], url: str) -> bytes | None:
        """Return the next piece, None at the end."""
        with self._waits.waiting(
            f"provider {url}, which gives no bytes",
            ends_by="a byte ends it, or its time limit: then another provider is asked",
            grace=UNANSWERED_SECONDS,
        ):
            return next(pieces, None)

    def _candidates(self, posting: PostRecord) -> Sequence[str]:
        """Return the providers to read from: the holders, or all while the chain does not say who
        they are.
        """
        try:
            return self.holders(posting)
        except StoreUnreachable:
            return self._selection.to_read(self._selection.listed())

    def _holders(self, posting: PostRecord) -> Sequence[str]:
        key = (posting.merkle_root, posting.owner, posting.start)
        with self._lock:
            known = self._remembered.get(key)
        if known and time.monotonic() - known[0] < HOLDERS_SECONDS:
            return known[1]
        try:
            file = self._chain.file(*key)
        except StoreUnreachable:
            if known:
                return known[1]
            raise
        holders = tuple(file.providers) if file else ()
        if holders:  # an unproven file may be proven any moment
            with self._lock:
                self._remembered[key] = (time.monotonic(), holders)
                self._remembered.move_to_end(key)
                if len(self._remembered) > MAX_REMEMBERED:
                    self._remembered.popitem(last=False)
        return holders


def _worst(posting: PostRecord, errors: Sequence[CafError]) -> CafError:
    """Return the error to raise where no provider gave the bytes: missing only where all say so."""
    root, said = posting.merkle_root.hex(), "; ".join(str(error) for error in errors)
    if all(isinstance(error, StoredChunkMissing) for error in errors):
        return StoredChunkMissing(f"no provider has file {root}{f': {said}' if said else ''}")
    if not any(isinstance(error, StoreUnreachable) for error in errors):
        return IntegrityError(f"no provider has file {root} as it was posted: {said}")
    return StoreUnreachable(
        f"file {root} is not read: {said}",
        hint="its providers may be back later; 'caf jackal files' names them",
    )
