"""The bytes of one range of a stored chunk, from whichever providers hold it: fail-over,
resumption, and who gave wrong bytes.

An object is one range, one in parts is several: each has its SHA-256.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from caf_pipeline.errors import (
    CafError,
    IntegrityError,
    ObjectMissing,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.ledger.records import LocatedRange, Location
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.pipeline_threads import consume_concurrently

ALONE_BYTES: Final = 4 << 20
"""Of a range that one thread reads, compares and writes: of less, starting others takes longer than
what they save.
"""

REPAIR: Final = "the chunk is damaged at the store: 'caf repair' stores it again"
"""The hint where the providers that have something of a chunk give other bytes."""


class RangeHolders:
    """The providers that hold a range, asked in turn: where one breaks off, the next goes on at the
    same byte.

    Who gave wrong bytes is asked no more. Where several gave some of them, it is not known who
    lied: then each is asked alone.

    Attributes:
        size_bytes: of the range.
        failed: the last error of each provider that did not give it right.
    """

    def __init__(self, one: LocatedRange, store: ChunkReader, key: str) -> None:
        self.size_bytes = one.end_byte - one.start_byte
        self.failed: dict[str, CafError] = {}
        self._one = one
        self._store = store
        self._key = key
        # Providers that are asked in turn for one reading. The next group is asked only where the
        # bytes of the first were wrong.
        self._groups: list[Sequence[str]] = []
        self._is_asked = False
        self._gave: set[str] = set()

    def pieces(self, start_byte: int, end_byte: int) -> Iterator[bytes]:
        """Yield the bytes from `start_byte` to `end_byte` (exclusive) of the range, in pieces of at
        most 1 MiB, not yet compared.

        Where a provider fails, the next one goes on at the same byte.

        Raises: ObjectMissing, IntegrityError, StoreUnreachable: every provider failed before the
            last byte; which of the three
                as by `copy`.
        """
        posting, offset = self._one.posting, self._one.start_byte
        position = start_byte
        self._ask()
        group = self._groups[0] if self._groups else ()
        self._gave = set()
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
                    self._gave.add(provider)
                    yield piece
            except (StoreError, IntegrityError) as error:
                self.failed[provider] = error
        if position < end_byte:
            self._groups = self._groups[1:] or self._groups
            raise self._refused()

    def compare(self, sha256: bytes) -> bool:
        """Tell whether the whole range, as `pieces` gave it last, is what was archived; else others
        are asked from now on.
        """
        if sha256 == self._one.sha256:
            return True
        self.refuse()
        return False

    def refuse(self) -> None:
        """Ask others from now on than who gave the bytes last: they were wrong."""
        group, *others = self._groups
        if len(self._gave) == 1:
            alone = []
            self.failed |= dict.fromkeys(
                self._gave, IntegrityError("its bytes do not match the SHA-256 in the ledger")
            )
        else:
            alone = [[one] for one in group if one in self._gave]
        left = [one for one in group if one not in self._gave]
        self._groups = [*alone, *([left] if left else []), *others]

    def copy(self, write: Callable[[bytes], object], begin_again: Callable[[], None]) -> None:
        """Give the whole range to `write`, and compare it; `begin_again` says that what was given
        is void.

        Raises: IntegrityError: the providers that have it give other bytes; the message names them.
            ObjectMissing: none has it. StoreUnreachable: no provider that answers gives it right,
            and one did not answer. After any of them, `begin_again` was called last.
        """
        self._ask()
        while groups := len(self._groups):
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
                if len(self._groups) == groups:
                    raise
            begin_again()
        raise self._refused()

    def _ask(self) -> None:
        """Learn who holds the range, once."""
        if not self._is_asked:
            self._groups, self._is_asked = (
                [self._store.holders(self._one.posting) if self.size_bytes else []],
                True,
            )

    def _refused(self) -> CafError:
        """Return the error for a range that no provider gave correctly; its class says whether a
        retry can help.
        """
        what = f"'{self._key}' (chunk {self._one.chunk})"
        if not self.failed and not self.size_bytes:
            return IntegrityError(
                f"{what} cannot be given as it was archived: its row has the SHA-256 of other bytes"
            )
        return not_given(what, self.failed)


def not_given(what: str, failed: Mapping[str, CafError]) -> CafError:
    """Return the error of what no provider gives right, by the error of each; its class says
    whether a retry can help.
    """
    errors = failed.values()
    if not errors:
        return ObjectMissing(f"no provider has {what}", hint="'caf repair' stores its chunk again")
    said = "; ".join(f"{provider}: {error}" for provider, error in failed.items())
    message = f"no provider gives {what} as it was archived: {said}"
    if any(not error.permanent for error in errors):
        return StoreUnreachable(message, hint="try again later")
    if any(isinstance(error, IntegrityError) for error in errors):
        return IntegrityError(message, hint=REPAIR)
    return ObjectMissing(message, hint="'caf repair' stores its chunk again")


def holders_of(location: Location, store: ChunkReader) -> list[RangeHolders]:
    """Return the ranges that an object is made of, in order, with who holds them; nobody is asked
    yet.

    Raises:
        IntegrityError: they are not as long as the object.
    """
    key, ranges = (
        location.row.key,
        [RangeHolders(one, store, location.row.key) for one in location.ranges],
    )
    if (found := sum(one.size_bytes for one in ranges)) != location.size_bytes:
        raise IntegrityError(f"the parts of '{key}' have {found} bytes of {location.size_bytes}")
    return ranges


def pieces_between(
    ranges: Sequence[RangeHolders], start_byte: int, end_byte: int
) -> Iterator[bytes]:
    """Yield `[start_byte, end_byte)` of the object that the ranges make up; they are not compared.

    Raises as `pieces`.
    """
    begin = 0
    for one in ranges:
        first, last = max(start_byte - begin, 0), min(end_byte - begin, one.size_bytes)
        if first < last:
            yield from one.pieces(first, last)
        begin += one.size_bytes
