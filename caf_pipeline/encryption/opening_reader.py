"""Reads encrypted chunks like plain ones, in CAF coordinates.

The header comes from the ledger, since anyone who knows a recipient can make a valid file.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from caf_pipeline.errors import IntegrityError
from caf_pipeline.ledger.records import ChunkHeader
from caf_pipeline.records import Copy, PostRecord
from caf_pipeline.settings import EncryptionSettings
from caf_pipeline.store.protocol import ChunkReader

if TYPE_CHECKING:
    from caf_pipeline.encryption.identities import Identities, Identity
    from caf_pipeline.encryption.opened_chunk import OpenedChunk

MAX_CACHED: Final = 1024
"""Opened chunks in memory, of about 2 KB each."""


class OpeningReader:
    """A `ChunkReader` whose ranges are of the CAF, also if the chunk is encrypted. Thread-safe.

    `read` may also raise IdentityMissing, NoMatchingIdentity, DamagedHeader and ForgedHeader. It
    raises IntegrityError for a segment that is not authentic.
    """

    def __init__(
        self,
        stored: ChunkReader,
        headers: Callable[[bytes], ChunkHeader | None],
        settings: EncryptionSettings,
        *,
        ask_passphrase: Callable[[], str] | None = None,
    ) -> None:
        """`stored` reads stored bytes. `headers` returns the header of a Merkle root's chunk."""
        self.stored = stored
        self.name = stored.name
        self.required_copies = stored.required_copies
        self._headers = headers
        self._settings = settings
        self._ask_passphrase = ask_passphrase
        self._identities: Identities | None = None
        self._lock = threading.Lock()
        self._opened: OrderedDict[bytes, OpenedChunk | None] = OrderedDict()

    def close(self) -> None:
        self.stored.close()

    def copies(self, posting: PostRecord) -> Sequence[Copy]:
        return self.stored.copies(posting)

    def holders(self, posting: PostRecord) -> Sequence[str]:
        return self.stored.holders(posting)

    def urls(self, posting: PostRecord) -> Mapping[str, str]:
        return self.stored.urls(posting)

    def read(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str | None = None
    ) -> Iterator[bytes]:
        chunk = self.open(posting)
        if chunk is None or start_byte >= end_byte:
            yield from self.stored.read(posting, start_byte, end_byte, provider=provider)
            return
        if end_byte > chunk.size_bytes:
            raise IntegrityError(
                f"the chunk has {chunk.size_bytes} bytes and ends before byte {end_byte}"
            )
        begin, end = chunk.stored_range(start_byte, end_byte)
        sealed = self.stored.read(posting, begin, end, provider=provider)
        yield from chunk.pieces(sealed, start_byte, end_byte)

    def has_lost(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str
    ) -> bool:
        if chunk := self.open(posting):
            start_byte, end_byte = chunk.stored_range(start_byte, end_byte)
        return self.stored.has_lost(posting, start_byte, end_byte, provider=provider)

    def identities(self) -> "Sequence[Identity]":
        # Readers of plain chunks start sooner without the primitives.
        from caf_pipeline.encryption.identities import Identities  # noqa: PLC0415

        self._identities = self._identities or Identities(self._settings, self._ask_passphrase)
        return self._identities.get()

    def open(self, posting: PostRecord) -> "OpenedChunk | None":
        """Return the chunk, None if it is not encrypted. Asks no provider.

        Raises IdentityMissing, KeyRefused, NoMatchingIdentity, DamagedHeader, or ForgedHeader.
        """
        root = posting.merkle_root
        with self._lock:
            if root in self._opened:
                return self._opened[root]
        opened = None
        if header := self._headers(root):
            from caf_pipeline.encryption.opened_chunk import OpenedChunk  # noqa: PLC0415

            opened = OpenedChunk.open(header, self.identities())
        with self._lock:
            self._opened[root] = opened
            if len(self._opened) > MAX_CACHED:
                self._opened.popitem(last=False)
        return opened
