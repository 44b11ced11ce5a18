"""What a restore is, wherever it goes: objects written that are not there, and what became of each.

The two places are `restore_folder` and `restore_bucket`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from caf_pipeline.errors import (
    CafError,
    IntegrityError,
    ObjectMissing,
    StoredChunkMissing,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.check import UNREAD_IN_A_ROW
from caf_pipeline.system.files_below import NotRestored
from caf_pipeline.system.quantities import counted

_GOES_ON: Final = "the same restore goes on, and leaves what is there"
_DAMAGED: Final = (
    "what no provider gives right stays away until 'caf repair' has stored its chunk again"
)
_STAYS: Final = "what was refused there is refused again until the reason given with it is gone"


class RestoreOutcome(StrEnum):
    """What became of an object; in a dry run, what would."""

    RESTORED = "restored"
    EQUAL = "equal"
    DIFFERENT = "different"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RestoredObject:
    """An object, and what became of it.

    Attributes: location: which. outcome: EQUAL and DIFFERENT say that something is there already,
        which was left as it is. place: its path in the folder, or its key in the bucket. error: why
        it failed. headers_known: whether it has its headers and user metadata, where it went to a
        bucket; of an adopted file none are known.
    """

    location: Location
    outcome: RestoreOutcome
    place: str = ""
    error: CafError | None = None
    headers_known: bool = True


class RestoreTarget(Protocol):
    """A place that objects are restored to."""

    def restore(self, listed: Iterable[Location]) -> Iterator[RestoredObject]:
        """Write objects that are not there, and yield what became of each, in any order.

        Memory does not grow with their number.

        Raises:
            StagingError, SourceError: the place takes no more, or is out of reach.
        """
        ...


def restore_objects(listed: Iterable[Location], target: RestoreTarget) -> Iterator[RestoredObject]:
    """Restore objects, as `RestoreTarget.restore`.

    Raises: What that raises. StoreUnreachable: `UNREAD_IN_A_ROW` objects one after the other could
        not be read.
    """
    unread = 0
    for one in target.restore(listed):
        yield one
        unread = unread + 1 if one.error and not one.error.permanent else 0
        if unread == UNREAD_IN_A_ROW:
            raise StoreUnreachable(
                f"{unread} objects in a row could not be read; the last: {one.error}", hint=_GOES_ON
            ) from one.error


@dataclass
class RestoreSums:
    """What became of all objects so far; `restored_bytes` and `without_headers` of those restored,
    `errors` the kinds met.

    Beside them, `not_yet_archived` and `skipped` are the objects below the prefix that no listing
    of the archive has. `older_versions` counts the other archived versions of the listed keys.
    """

    listed: int = 0
    restored: int = 0
    restored_bytes: int = 0
    without_headers: int = 0
    equal: int = 0
    different: int = 0
    failed: int = 0
    errors: set[type[CafError]] = field(default_factory=set)
    not_yet_archived: int = 0
    skipped: int = 0
    older_versions: int = 0

    def add(self, one: RestoredObject) -> None:
        """Count an object."""
        self.listed += 1
        self.older_versions += one.location.older_versions
        setattr(self, one.outcome.value, getattr(self, one.outcome.value) + 1)
        if one.outcome is RestoreOutcome.RESTORED:
            self.restored_bytes += one.location.size_bytes
            self.without_headers += not one.headers_known
        if one.error:
            self.errors.add(type(one.error))

    @property
    def beside(self) -> str:
        """Return what a restore cannot have brought back, as a part of a sentence; empty where
        there is nothing.
        """
        if not self.not_yet_archived and not self.skipped:
            return ""
        return (
            f"beside these, {counted(self.not_yet_archived, 'object')} not archived yet and "
            f"{self.skipped:,} skipped"
        )

    def _met(self, *kinds: type[CafError]) -> bool:
        return any(issubclass(error, kinds) for error in self.errors)

    def failure(self, ended: CafError | None, force: str = "--force") -> CafError | None:
        """Return the error that says why not all is there; None where all is.

        It is the one that ended the list, where there is such, but for what no other try makes
        right: wrong bytes, and objects that no provider has. `force` names the option that replaces
        what is different.
        """
        if not ended and not self.failed and not self.different:
            return None
        is_lost = self._met(IntegrityError, StoredChunkMissing)
        if ended and not is_lost:
            return ended
        kinds = (IntegrityError, StoredChunkMissing, StoreUnreachable, StoreError)
        kind = next((kind for kind in kinds if self._met(kind)), CafError)
        if kind is StoredChunkMissing:
            kind = ObjectMissing
        others = any(
            not issubclass(error, IntegrityError | StoredChunkMissing | NotRestored)
            for error in self.errors
        )
        hints = (
            [_GOES_ON] * (others or ended is not None)
            + [_DAMAGED] * is_lost
            + [_STAYS] * self._met(NotRestored)
        )
        hints += [f"{force} replaces what is different"] * bool(self.different)
        said = (
            f"{counted(self.failed + self.different, 'object')} of {self.listed:,} could not "
            "be "
            "restored"
        )
        return kind(said, hint="; ".join(hints))
