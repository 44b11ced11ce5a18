"""Restores archived objects to a folder (`restore_folder`) or a bucket (`restore_bucket`)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from caf_pipeline.errors import (
    CafError,
    IntegrityError,
    ObjectMissing,
    PrivateAddress,
    RowAltered,
    StoredChunkMissing,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.check import FailuresInARow
from caf_pipeline.retrieval.holders import ROW
from caf_pipeline.system.files_below import NotRestored
from caf_pipeline.system.quantities import counted

_RESUMES: Final = "running the same restore again resumes and skips what is there"
_DAMAGED: Final = "'caf repair' must store the chunk of objects that no copy returns correctly"
_REFUSED: Final = "objects that the target refused stay missing until their reason is gone"


class RestoreOutcome(StrEnum):
    """A dry run reports the expected outcome."""

    RESTORED = "restored"
    EQUAL = "equal"
    DIFFERENT = "different"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RestoredObject:
    """The result for one object, at a path or a key.

    EQUAL and DIFFERENT objects existed and were left unchanged. `headers_known` is False for
    adopted files.
    """

    location: Location
    outcome: RestoreOutcome
    place: str = ""
    error: CafError | None = None
    headers_known: bool = True


class RestoreTarget(Protocol):
    """A place that objects are restored to."""

    def restore(self, listed: Iterable[Location]) -> Iterator[RestoredObject]:
        """Write the objects that are not there, and yield a result for each, in any order.

        Memory is constant.
        """
        ...


def restore_objects(listed: Iterable[Location], target: RestoreTarget) -> Iterator[RestoredObject]:
    """Raise an error like the last after `UNREAD_IN_A_ROW` transient failures."""
    failures = FailuresInARow(_RESUMES)
    for restored in target.restore(listed):
        yield restored
        failures.add(restored.error)


@dataclass
class RestoreSums:
    """Counts of the results. `not_yet_archived` and `skipped` are objects that no listing has."""

    listed: int = 0
    restored: int = 0
    restored_bytes: int = 0
    without_headers: int = 0
    from_unknown_posts: int = 0
    equal: int = 0
    different: int = 0
    failed: int = 0
    errors: set[type[CafError]] = field(default_factory=set)
    not_yet_archived: int = 0
    skipped: int = 0
    older_versions: int = 0

    def add(self, restored: RestoredObject) -> None:
        self.listed += 1
        self.older_versions += restored.location.older_versions
        self.from_unknown_posts += restored.location.from_unknown_post
        setattr(self, restored.outcome.value, getattr(self, restored.outcome.value) + 1)
        if restored.outcome is RestoreOutcome.RESTORED:
            self.restored_bytes += restored.location.size_bytes
            self.without_headers += not restored.headers_known
        if restored.error:
            self.errors.add(type(restored.error))

    @property
    def beside(self) -> str:
        """Counts the objects a restore cannot bring back; or ""."""
        if not self.not_yet_archived and not self.skipped:
            return ""
        return (
            f"beside these, {counted(self.not_yet_archived, 'object')} not archived yet and "
            f"{self.skipped:,} skipped"
        )

    def _met(self, *kinds: type[CafError]) -> bool:
        return any(issubclass(error, kinds) for error in self.errors)

    def failure(self, ended: CafError | None, force: str = "--force") -> CafError | None:
        """Return the error that ended the results, or that objects need a repair, or None."""
        if not ended and not self.failed and not self.different:
            return None
        is_lost = self._met(IntegrityError, StoredChunkMissing)
        if ended and not is_lost:
            return ended
        kinds = (IntegrityError, StoredChunkMissing, PrivateAddress, StoreUnreachable, StoreError)
        kind = next((kind for kind in kinds if self._met(kind)), CafError)
        if kind is StoredChunkMissing:
            kind = ObjectMissing
        resumes = ended is not None or any(
            not issubclass(error, IntegrityError | StoredChunkMissing | NotRestored)
            for error in self.errors
        )
        is_damaged = any(
            issubclass(error, IntegrityError | StoredChunkMissing) and error is not RowAltered
            for error in self.errors
        )
        hints = [PrivateAddress.remedy] * self._met(PrivateAddress) + [_RESUMES] * resumes
        hints += [_DAMAGED] * is_damaged + [_REFUSED] * self._met(NotRestored)
        hints += [f"altered rows: {ROW}"] * self._met(RowAltered)
        hints += [f"{force} replaces what is different"] * bool(self.different)
        count = counted(self.failed + self.different, "object")
        return kind(f"{count} of {self.listed:,} could not be restored", hint="; ".join(hints))
