"""The error tree: every failure that a user can meet, with its exit code and a hint.

    CafError                       1   anything below, also raised as itself for "some of it failed"
    ├── UsageError                 2   arguments that make no sense together ├── SettingsError
    3   caf.toml or the environment │   └── MnemonicRefused            no mnemonic, not one, or its
    file is open to others ├── ArchiveError               4   a CAF file, or one of another format │
    ├── MalformedArchive           breaks a rule of its format │   ├── ArchiveLimitReached
    the member or the archive is larger than allowed │   ├── MemberRefused              wrong
    declared length, key given twice, key not UTF-8 │   └── MemberNotFound             the archive
    has no such key ├── SourceError                5   the S3 side │   ├── SourceDenied
    credentials refused │   ├── BucketMissing │   ├── SourceUnreachable     (t)  no answer, 5xx,
    slow-down │   ├── ListingRefused             an answer to a listing that breaks the protocol │
    │   └── ListingUnordered       keys that are not in the order of their bytes, or not from where
    they were asked for │   ├── ReportRefused              an inventory report that is missing,
    damaged, too old or of something else │   ├── ObjectReadFailed      (t)  one object's bytes did
    not come as promised │   └── ObjectUnavailable          one object cannot be archived, with its
    skip reason ├── LedgerError                6   the database │   ├── LedgerUnreachable     (t) │
    ├── ClaimConflict         (t)  another plan claimed an object first │   ├── IllegalMove
    a chunk cannot go from this state to that │   └── LeaseLost                  another run works
    on the chunk now ├── StoreError                 7   where chunks are kept │   ├──
    StoreUnreachable      (t) │   │   ├── NoChainAnswer     (t)  the store as a whole gives no
    answer that counts │   │   │   ├── StoreAway         (t)  the folder does not hold the chunks,
    e.g. its disk is not mounted │   │   │   ├── ChainUnreachable  (t)  no LCD answers │   │   │
    ├── ChainBehind  (t)  nodes answer, but below a height seen before │   │   │   └── ChainHalted
    (t)  the newest block is old │   │   └── NoProvider        (t)  no provider can be reached, or
    none has room │   ├── NotProven             (t)  too few copies listed or read back within the
    time limit │   ├── StoredChunkMissing         the store does not have the chunk │   │   └──
    ObjectMissing      9   every provider was asked, and none has the object: no other try gives it
    │   ├── ChunkTooLarge              no provider takes this many bytes in the time it gives an
    upload │   ├── RootRefused                providers say that the bytes are not those that were
    posted │   ├── TransactionRefused         the chain included or refused a transaction with a
    code of its own │   ├── EmptyWallet                the wallet is unknown to the chain or cannot
    pay │   ├── NoStoragePlan              nothing was bought │   │   └── PlanExpired │   ├──
    PlanTooSmall               the bought space is too small for what is to be posted │   ├──
    SpendCapReached            the operator's limit on what may be spent │   ├── StoredAlready
    the store has files, unknown to the ledger, that may hold the objects │   ├── UploadsRefused
    settings or limits leave too few providers, whatever they answer │   └── NotPublic
    a source that may not go out in the clear ├── StagingError               8   disk full, folder
    missing or read-only ├── IntegrityError             9   bytes are not what was recorded ├──
    HeldByOther               10   another live run holds it: an outcome, not a failure ├──
    NotLocated                11   no location row for what was asked ├── AlertNotSent
    17   an alert reached nobody: it is sent again └── NoDaemon              (t) 16   no Dagster
    daemon runs that would do what is asked for

(t) is transient: the same call may succeed later. All others are permanent: a retry cannot help
until somebody changes something.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells count."""


class CafError(Exception):
    """A failure that the user sees as one sentence, with a hint on what to do.

    Attributes:
        exit_code: the process's exit status when this error ends a command.
        permanent: False where the same call may succeed later without anybody changing anything.
        hint: what the user can do, one sentence, or "" where the message says it all.
    """

    exit_code: ClassVar[int] = 1
    permanent: ClassVar[bool] = True

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Let it pass between processes, whatever its own arguments are; its cause stays behind."""
        return _made_again, (type(self), self.args, self.__dict__)


def _made_again(
    kind: type[CafError], args: tuple[object, ...], attributes: Mapping[str, object]
) -> CafError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def interrupt_behind(error: BaseException | None) -> BaseException | None:
    """Return the interrupt (KeyboardInterrupt, or Dagster's own) that an error is only a
    consequence of; None where none is.

    A driver that an interrupt broke off in the middle of a statement raises an error of its own
    when it is closed.
    """
    while isinstance(error, Exception):
        error = error.__cause__ or error.__context__
    return error


def with_hint(error: Exception) -> str:
    """Return what an error says and, after a semicolon, its hint where it has one; without a full
    stop.
    """
    hint = error.hint if isinstance(error, CafError) else ""
    return "; ".join(part.rstrip(".") for part in (str(error), hint) if part)


def one_line(text: str) -> str:
    """Return text that cannot move the cursor or begin a line of its own: a server's words may be
    part of it.
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def first_line(error: BaseException | None) -> str:
    """Return the first line of a library's message that is not empty, or the name of the error's
    class.
    """
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


class UsageError(CafError):
    """The arguments of a command make no sense together."""

    exit_code = 2


class SettingsError(CafError):
    """A setting is missing or has a bad value; the message names the setting."""

    exit_code = 3


class MnemonicRefused(SettingsError):
    """There is no mnemonic, it is not a valid one, or the file that holds it is open to others."""


class ArchiveError(CafError):
    """Something about one CAF file, or one of another format."""

    exit_code = 4


class MalformedArchive(ArchiveError):
    """The file breaks a rule of its format."""


class ArchiveLimitReached(ArchiveError):
    """The member does not fit, or the archive is larger than the limits allow."""


class MemberRefused(ArchiveError):
    """The member cannot be added; the archive is as it was before."""


class MemberNotFound(ArchiveError):
    """The archive has no member of that key."""


class SourceError(CafError):
    """Something about the S3 side."""

    exit_code = 5


class SourceDenied(SourceError):
    """The source refuses the credentials, or the credentials lack a permission."""


class BucketMissing(SourceError):
    """There is no such bucket."""


class SourceUnreachable(SourceError):
    """No answer, a server error, or a request to slow down, after all retries."""

    permanent = False


class ListingRefused(SourceError):
    """A listing's answer breaks the protocol; nothing of it was taken."""


class ListingUnordered(ListingRefused):
    """A listing is not in the order of the bytes of its keys, or does not begin where it was asked
    to: it has no parts.
    """


class ReportRefused(SourceError):
    """There is no complete inventory report, or it is damaged, too old or of something else;
    nothing of it was taken.
    """


class ObjectReadFailed(SourceError):
    """One object's bytes did not come as promised, after all retries of this run."""

    permanent = False


class ObjectUnavailable(SourceError):
    """One object cannot be archived now; the chunk goes on without it.

    Attributes:
        reason: a value of `inventory.objects.SkipReason`.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class LedgerError(CafError):
    """Something about the database."""

    exit_code = 6


class LedgerUnreachable(LedgerError):
    """The database is away or broke the connection."""

    permanent = False


class ClaimConflict(LedgerError):
    """An object of the plan is claimed or located already; planning again sees it."""

    permanent = False


class IllegalMove(LedgerError):
    """The chunk is not in a state from which this move is legal."""


class LeaseLost(LedgerError):
    """Another run took the lease over; nothing of this run's move was written."""


class StoreError(CafError):
    """Something about the place where chunks are kept."""

    exit_code = 7


class StoreUnreachable(StoreError):
    """No answer from the store, after all retries."""

    permanent = False


class NoChainAnswer(StoreUnreachable):
    """No node of the chain gives a valid answer, or the store's folder is away.

    That says nothing of any chunk.
    """


class StoreAway(NoChainAnswer):
    """The folder does not hold the chunks: it has no marker file, or the marker file of another
    store.
    """


class ChainUnreachable(NoChainAnswer):
    """No LCD answers, or none with what a chain would say."""


class ChainBehind(NoChainAnswer):
    """Every node that answers is below a height that was seen before; what it does not know proves
    nothing.
    """


class ChainHalted(NoChainAnswer):
    """The newest block is old: transactions are taken and not included."""


class NoProvider(StoreUnreachable):
    """Not enough providers can be reached, have room, and take the chunk."""


class NotProven(StoreError):
    """Too few copies were listed by the chain and read back right within the time limit; the
    message names them.
    """

    permanent = False


class ChunkTooLarge(StoreError):
    """No provider takes this many bytes within the time that it gives an upload.

    Attributes:
        fitting_bytes: what would fit, by the rates measured.
    """

    def __init__(self, message: str, *, fitting_bytes: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.fitting_bytes = fitting_bytes


class RootRefused(StoreError):
    """Providers say that the bytes are not those whose root and size the chain has."""


class TransactionRefused(StoreError):
    """The chain refused a transaction, or included it and let it fail, with a code of its own.

    Attributes:
        code: the chain's; codespace: whose code it is.
    """

    def __init__(self, message: str, *, code: int, codespace: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.codespace = codespace


class EmptyWallet(StoreError):
    """The chain does not know the wallet's account, or it cannot pay."""


class NoStoragePlan(StoreError):
    """The wallet has bought no space."""


class PlanExpired(NoStoragePlan):
    """The space that the wallet bought has run out."""


class PlanTooSmall(StoreError):
    """The bought space that is left is too small for what is to be posted.

    Attributes:
        fitting_bytes: what there is room for, in bytes of one copy; 0 where that is not known.
    """

    def __init__(self, message: str, *, fitting_bytes: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.fitting_bytes = fitting_bytes


class SpendCapReached(StoreError):
    """A transaction would spend more than the operator allows."""


class StoredAlready(StoreError):
    """The store has files that the ledger does not know, and that may hold objects of a source:
    they would be paid for again.
    """


class UploadsRefused(StoreError):
    """As the settings and limits are, too few providers may be sent a chunk, however they
    answer.
    """


class StoredChunkMissing(StoreError):
    """The store does not have the chunk, or not enough copies of it."""


class ObjectMissing(StoredChunkMissing):
    """Every provider says that it does not have an archived object: as where all give other bytes,
    no other try gives it.
    """

    exit_code = 9


class NotPublic(StoreError):
    """The source is not marked `public = true`, so its bytes may not leave in the clear."""


class StagingError(CafError):
    """The staging folder is full, missing, or cannot be written."""

    exit_code = 8


class IntegrityError(CafError):
    """Bytes are not what was recorded of them."""

    exit_code = 9


class HeldByOther(CafError):
    """Another live run holds the lease that this one needs.

    Attributes:
        holder: the run that holds it.
    """

    exit_code = 10

    def __init__(self, message: str, *, holder: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.holder = holder


class NotLocated(CafError):
    """There is no location row for the object, or no such chunk or source."""

    exit_code = 11


class AlertNotSent(CafError):
    """A webhook or a mail server did not take an alert.

    It counts as permanent: a tick is to fail by it; the next sends it.
    """

    exit_code = 17


class NoDaemon(CafError):
    """No Dagster daemon runs that would do what is asked for."""

    exit_code = 16  # 12 to 15 and 18 are those of commands that came to their end
    permanent = False


HITS_EVERY_CHUNK: Final = (
    SettingsError,
    NotPublic,
    NoStoragePlan,
    EmptyWallet,
    SpendCapReached,
    UploadsRefused,
    StoredAlready,
)
"""What the next chunk would meet just the same: nothing is gained by trying it before somebody has
changed something.
"""
