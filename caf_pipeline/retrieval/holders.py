"""Reads a range of a stored chunk from its providers: with fail-over, and blame for wrong bytes.

An object is one range, or several if it is split. Each has its SHA-256.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from caf_pipeline.errors import (
    CafError,
    IntegrityError,
    ObjectMissing,
    PrivateAddress,
    RowAltered,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.ledger.records import LocatedRange, Location
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.pipeline_threads import consume_concurrently

ALONE_BYTES: Final = 4 << 20
"""Up to this size one thread is faster than several."""

ROW: Final = (
    "restore a backup; or delete the row from file_locations and run 'caf rebuild', which restores "
    "it from the chunk"
)
REPAIR: Final = "the chunk is damaged at the store: 'caf repair' stores it again"


class RangeHolders:
    """The providers of a range, asked in turn. If one fails, the next goes on at the same byte.

    A provider that alone returned wrong bytes is not asked again. If there were several, each is
    asked alone.
    """

    def __init__(
        self, located: LocatedRange, store: ChunkReader, key: str, object_version: str = ""
    ) -> None:
        """`object_version` is of the object in the range; "": the range is of several objects."""
        self.size_bytes = located.end_byte - located.start_byte
        self.failed: dict[str, CafError] = {}
        self._range = located
        self._store = store
        self._key = key
        self._object_version = object_version
        # Groups of providers. The next group is asked only if the bytes of the first were wrong.
        self._groups: list[Sequence[str]] = []
        self._is_looked_up = False
        self._contributors: set[str] = set()

    def pieces(self, start_byte: int, end_byte: int) -> Iterator[bytes]:
        """Yield unverified pieces of at most 1 MiB. Raises as `copy`."""
        posting, offset = self._range.posting, self._range.start_byte
        position = start_byte
        self._look_up_holders()
        group = self._groups[0] if self._groups else ()
        self._contributors = set()
        for provider in group:
            if position == end_byte or (
                provider in self.failed and self.failed[provider].permanent
            ):
                continue
            try:
                for piece in self._store.read(
                    posting, offset + position, offset + end_byte, provider=provider
                ):
                    position += len(piece)
                    self._contributors.add(provider)
                    yield piece
            except (StoreError, IntegrityError) as error:
                self.failed[provider] = error
        if position < end_byte:
            self._groups = self._groups[1:] or self._groups
            raise self._read_error()

    def compare(self, sha256: bytes) -> bool:
        """Return whether the SHA-256 is right; if not, refuse the bytes."""
        if sha256 == self._range.sha256:
            return True
        self.refuse()
        return False

    def refuse(self) -> None:
        group, *others = self._groups
        if len(self._contributors) == 1:
            suspects = []
            self.failed |= dict.fromkeys(
                self._contributors,
                IntegrityError("its bytes do not match the SHA-256 in the ledger"),
            )
        else:
            suspects = [[provider] for provider in group if provider in self._contributors]
        unused = [provider for provider in group if provider not in self._contributors]
        self._groups = [*suspects, *([unused] if unused else []), *others]

    def copy(self, write: Callable[[bytes], object], begin_again: Callable[[], None]) -> None:
        """Pass the whole range to `write` and verify it.

        `begin_again` is called when all that was written is void, and before each error. Raises the
        errors of `ArchivedObject.write_to`.
        """
        self._look_up_holders()
        while group_count := len(self._groups):
            digest = hashlib.sha256()
            try:
                pieces = self.pieces(0, self.size_bytes)
                if self.size_bytes > ALONE_BYTES:
                    consume_concurrently(pieces, digest.update, write)
                else:
                    for piece in pieces:
                        digest.update(piece)
                        write(piece)
                if self.compare(digest.digest()):
                    return
            except (StoreError, IntegrityError):
                begin_again()
                if len(self._groups) == group_count:
                    raise
            begin_again()
        raise self._read_error()

    def _look_up_holders(self) -> None:
        if not self._is_looked_up:
            self._groups = [self._store.holders(self._range.posting) if self.size_bytes else []]
            self._is_looked_up = True

    def _read_error(self) -> CafError:
        what = f"'{self._key}' (chunk {self._range.chunk})"
        if not self.failed and not self.size_bytes:
            return IntegrityError(f"{what} is empty, but its SHA-256 is that of other bytes")
        error = unreadable(what, self.failed)
        if isinstance(error, IntegrityError) and self._object_version:
            # Loaded here because most reads find nothing wrong.
            from caf_pipeline.retrieval.altered_rows import is_altered  # noqa: PLC0415

            if is_altered(self._store, self._range, self._key, self._object_version):
                return RowAltered(
                    f"the ledger's row of {what} does not fit the chunk's own manifest, and the "
                    "stored bytes fit it: the row was altered, or all copies are forged",
                    hint=f"'caf check' reads the chunk whole; if it is not damaged, {ROW}",
                )
        return error


def unreadable(what: str, failed: Mapping[str, CafError]) -> CafError:
    """Return the error, whose class says if a retry can help.

    Its message has the first cause. The other providers' causes are its notes.
    """
    repair = "'caf repair' stores its chunk again"
    if not failed:
        return ObjectMissing(f"no copy has {what}", hint=repair)
    # A private address alone is no outage: any stranger may register one on the chain.
    private = {name: error for name, error in failed.items() if isinstance(error, PrivateAddress)}
    silent = {
        name: error for name, error in failed.items() if not error.permanent and name not in private
    }
    wrong = {name: error for name, error in failed.items() if isinstance(error, IntegrityError)}
    kind: type[CafError] = ObjectMissing
    causes, hint = failed, repair
    if silent:
        kind, causes, hint = StoreUnreachable, silent, "try again later"
    elif private:
        kind, causes, hint = PrivateAddress, private, PrivateAddress.remedy
    elif wrong:
        kind, causes, hint = IntegrityError, wrong, REPAIR
    (provider, first), *others = {**causes, **failed}.items()
    error = kind(f"no copy returns {what} as it was archived; {provider}: {first}", hint=hint)
    for provider, other in others:
        error.add_note(f"{provider}: {other}")
    return error


def holders_of(location: Location, store: ChunkReader) -> list[RangeHolders]:
    """Return an object's ranges. Raises IntegrityError for wrong sizes."""
    key, version = location.row.key, location.row.object_version
    ranges = [RangeHolders(located, store, key, version) for located in location.ranges]
    if (total := sum(part.size_bytes for part in ranges)) != location.size_bytes:
        raise IntegrityError(f"the parts of '{key}' have {total} bytes of {location.size_bytes}")
    return ranges


def pieces_between(
    ranges: Sequence[RangeHolders], start_byte: int, end_byte: int
) -> Iterator[bytes]:
    """Yield `[start_byte, end_byte)`, not verified."""
    begin = 0
    for part in ranges:
        first, last = max(start_byte - begin, 0), min(end_byte - begin, part.size_bytes)
        if first < last:
            yield from part.pieces(first, last)
        begin += part.size_bytes
