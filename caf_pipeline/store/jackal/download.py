"""Reads stored bytes from providers, the fastest first, with failover."""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from caf_pipeline.errors import (
    CafError,
    IntegrityError,
    PrivateAddress,
    StoredChunkMissing,
    StoreUnreachable,
)
from caf_pipeline.records import PostRecord, ProviderRecords
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.provider_selection import ProviderSelection
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

HOLDERS_SECONDS: Final = 60.0
"""Maximum age of cached holders. Thousands of objects are read from one chunk in a row."""

MAX_CACHED: Final = 4096

MEASURED_FROM_BYTES: Final = 4 << 20
"""Shorter reads measure the round trip, not a rate."""


class Downloads:
    """Reads posted files. Safe for several threads."""

    def __init__(
        self,
        chain: Chain,
        records: ProviderRecords,
        selection: ProviderSelection,
        waits: Waits | None = None,
    ) -> None:
        self.chain = chain
        self._records = records
        self._selection = selection
        self._waits = waits or Waits()
        self._lock = threading.Lock()
        self._cached_holders: OrderedDict[tuple[bytes, str, int], tuple[float, Sequence[str]]] = (
            OrderedDict()
        )

    def holders(self, posting: PostRecord) -> Sequence[str]:
        """Uses the last known holders while no chain node answers."""
        key = (posting.merkle_root, posting.owner, posting.start)
        with self._lock:
            cached = self._cached_holders.get(key)
        if cached and time.monotonic() - cached[0] < HOLDERS_SECONDS:
            return self._selection.to_read(cached[1])
        # A read needs the providers' addresses, too. Both are requested side by side, and `client`
        # waits for the list. A daemon, since an interrupted command must not wait for the chain.
        threading.Thread(target=self._list_providers, daemon=True).start()
        try:
            file = self.chain.file(*key)
        except StoreUnreachable:
            if cached:
                return self._selection.to_read(cached[1])
            raise
        holders = tuple(file.providers) if file else ()
        if holders:  # a file without holders may get one any moment
            with self._lock:
                self._cached_holders[key] = (time.monotonic(), holders)
                self._cached_holders.move_to_end(key)
                if len(self._cached_holders) > MAX_CACHED:
                    self._cached_holders.popitem(last=False)
        return self._selection.to_read(holders)

    def _list_providers(self) -> None:
        with contextlib.suppress(Exception):  # `client` lists them again, and raises
            self._selection.listed()

    def possible_holders(self, posting: PostRecord) -> Sequence[str]:
        """A provider may have the bytes before the chain lists it as a holder, or after a drop."""
        return self._selection.to_read(
            [*self.holders(posting), *self._selection.listed(fresh=True)]
        )

    def urls(self, posting: PostRecord) -> Mapping[str, str]:
        clients = {address: self._selection.client(address) for address in self.holders(posting)}
        return {
            address: client.download_url(posting) for address, client in clients.items() if client
        }

    def read(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str | None = None
    ) -> Iterator[bytes]:
        root = posting.merkle_root.hex()
        if end_byte > posting.stored_size_bytes:
            raise IntegrityError(
                f"file {root} has {posting.stored_size_bytes} bytes and ends before byte {end_byte}"
            )
        if provider:
            candidates: Sequence[str] = [provider]
        else:
            try:
                candidates = self.holders(posting)
            except StoreUnreachable:  # the chain does not answer: try every provider
                candidates = self._selection.to_read(self._selection.listed())
        position, errors = start_byte, list[CafError]()
        for address in candidates:
            if position >= end_byte:
                return
            try:
                for piece in self._read_from(address, posting, position, end_byte):
                    position += len(piece)
                    yield piece
            except (StoreUnreachable, StoredChunkMissing, IntegrityError) as error:
                self._records.failed(address)
                errors.append(error)
        if position >= end_byte:
            return
        raise errors[0] if provider else _read_error(root, errors)

    def has_lost(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str
    ) -> bool:
        try:
            client = self._selection.client(provider)
        except StoreUnreachable:
            return False
        if client is None:
            return False
        with self._waits.waiting(
            f"provider {client.url}, which returned nothing of a range and is tried again",
            ends_by="ends with the range, or a timeout",
            grace=UNANSWERED_SECONDS,
        ):
            return client.has_lost(posting, start_byte, end_byte)

    def _read_from(
        self, address: str, posting: PostRecord, start_byte: int, end_byte: int
    ) -> Iterator[bytes]:
        client = self._selection.client(address)
        if client is None:
            raise StoreUnreachable(f"provider {address} has no usable address")
        waited = 0.0
        pieces = iter(client.download(posting, start_byte, end_byte))
        while True:
            asked_at = time.monotonic()
            with self._waits.waiting(
                f"provider {client.url}, which sends no bytes",
                ends_by="ends with a byte or a timeout; then another provider is tried",
                grace=UNANSWERED_SECONDS,
            ):
                piece = next(pieces, None)
            if piece is None:
                break
            waited += time.monotonic() - asked_at  # without the caller's work on a piece
            yield piece
        if end_byte - start_byte >= MEASURED_FROM_BYTES and waited > 0:
            self._records.downloaded(address, end_byte - start_byte, waited)


def _read_error(root: str, errors: Sequence[CafError]) -> CafError:
    reasons = "; ".join(str(error) for error in errors)
    if all(isinstance(error, StoredChunkMissing) for error in errors):
        return StoredChunkMissing(f"no provider has file {root}{f': {reasons}' if reasons else ''}")
    unreachable = [error for error in errors if isinstance(error, StoreUnreachable)]
    if not unreachable:
        return IntegrityError(f"no provider has the posted bytes of file {root}: {reasons}")
    what = f"file {root} cannot be read: {reasons}"
    if all(isinstance(error, PrivateAddress) for error in unreachable):
        return PrivateAddress(what, hint=PrivateAddress.remedy)
    return StoreUnreachable(what, hint="try again later; 'caf jackal files' lists its providers")
