"""The error tree. Each error has an exit code, and knows whether a retry can help.

    CafError                       1   some of the work failed
    ├── UsageError                 2   arguments that exclude each other
    ├── SettingsError              3   caf.toml or the environment
    │   ├── MnemonicRefused
    │   ├── KeyRefused
    │   └── IdentityMissing
    ├── ArchiveError               4   a CAF file, or a file of another format
    │   ├── MalformedArchive
    │   │   ├── DamagedHeader
    │   │   ├── ForgedHeader
    │   │   └── DamagedPayload
    │   ├── NoMatchingIdentity  3
    │   ├── ArchiveLimitReached
    │   ├── MemberRefused
    │   └── MemberNotFound
    ├── SourceError                5   S3
    │   ├── SourceDenied
    │   ├── BucketMissing
    │   ├── SourceUnreachable  (t)
    │   ├── ListingRefused
    │   │   └── ListingUnordered
    │   ├── ReportRefused
    │   ├── ObjectReadFailed  (t)
    │   └── ObjectUnavailable
    ├── LedgerError                6   the database
    │   ├── LedgerUnreachable  (t)
    │   ├── ClaimConflict  (t)
    │   ├── IllegalMove
    │   └── LeaseLost
    ├── StoreError                 7   the store of chunks
    │   ├── StoreUnreachable  (t)
    │   │   ├── NoChainAnswer  (t)
    │   │   │   ├── StoreAway  (t)
    │   │   │   ├── ChainUnreachable  (t)
    │   │   │   ├── ChainBehind  (t)
    │   │   │   └── ChainHalted  (t)
    │   │   ├── NoProvider  (t)
    │   │   └── PrivateAddress  (t) 3
    │   ├── NotProven  (t)
    │   ├── StoredChunkMissing
    │   │   └── ObjectMissing  9
    │   ├── ChunkTooLarge
    │   ├── RootRefused
    │   ├── TransactionRefused
    │   ├── EmptyWallet
    │   ├── NoStoragePlan
    │   │   └── PlanExpired
    │   ├── PlanTooSmall
    │   ├── SpendCapReached
    │   ├── StoredAlready
    │   ├── UploadsRefused
    │   └── NotPublic
    ├── StagingError               8   the disk is full, or the folder missing or read-only
    ├── IntegrityError             9   bytes differ from what was recorded
    │   └── RowAltered
    ├── HeldByOther               10   another live run holds the lease
    ├── NotLocated                11   no such archived object, chunk or source
    ├── AlertNotSent              17   no receiver took an alert; the next tick sends it again
    └── NoDaemon              (t) 16   no Dagster daemon runs

(t): transient. The same call may succeed later. All other errors are permanent: a retry cannot
help until somebody changes something.
"""

import errno
from collections.abc import Mapping
from typing import ClassVar, Final

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells count."""

_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class CafError(Exception):
    """A failure that the user sees as one sentence, with a hint.

    Attributes:
        exit_code: Exit status of the command.
        exit_text: The meaning of the status, in help and docs.
        permanent: False if the same call may succeed later without any change.
        hint: What the user can do, in one sentence, or "".
    """

    exit_code: ClassVar[int] = 1
    exit_text: ClassVar[str] = "Something failed."
    permanent: ClassVar[bool] = True

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the attributes without calling `__init__`. The cause is dropped."""
        return _unpickle, (type(self), self.args, self.__dict__)


def _unpickle(
    kind: type[CafError], args: tuple[object, ...], attributes: Mapping[str, object]
) -> CafError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def interrupt_behind(error: BaseException | None) -> BaseException | None:
    """Return the interrupt that caused an error, or None: a KeyboardInterrupt, or Dagster's own.

    A driver that is interrupted in a statement raises a different error when it is closed.
    """
    passed = set[int]()  # an error that was raised again may be behind itself
    while isinstance(error, Exception) and id(error) not in passed:
        passed.add(id(error))
        error = error.__cause__ or error.__context__
    return None if isinstance(error, Exception) else error


def exit_texts() -> dict[int, str]:
    """Return what each exit status of an error means."""
    texts = {CafError.exit_code: CafError.exit_text}
    for kind in CafError.__subclasses__():
        texts[kind.exit_code] = kind.exit_text
    return texts


def exit_code_of(error: Exception) -> int:
    """Return the exit status of a command that ends with this error, whoever raised it."""
    if isinstance(error, CafError):
        return error.exit_code
    is_full = isinstance(error, OSError) and error.errno in _NO_SPACE
    return StagingError.exit_code if is_full else CafError.exit_code


def with_hint(error: Exception) -> str:
    """Return an error's message and hint, joined by a semicolon, without a full stop."""
    hint = error.hint if isinstance(error, CafError) else ""
    return "; ".join(part.rstrip(".") for part in (str(error), hint) if part)


def one_line(text: str) -> str:
    """Escape control characters, so that text from a server cannot move the cursor."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def first_line(error: BaseException | None) -> str:
    """Return the first line of a library's message that is not empty, or the class name."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


class UsageError(CafError):
    """The arguments of a command exclude each other."""

    exit_code = 2
    exit_text = "Wrong arguments."


class SettingsError(CafError):
    """A setting is missing or wrong. The message names it."""

    exit_code = 3
    exit_text = "Wrong settings or source."


class MnemonicRefused(SettingsError):
    """There is no mnemonic, it is invalid, or other users can read its file."""


class KeyRefused(SettingsError):
    """The text is not an age key, or the keys exclude each other. The message has no secret."""


class IdentityMissing(SettingsError):
    """No identity is configured, so that no encrypted chunk can be read."""


class ArchiveError(CafError):
    """A failure of one CAF file, or of one file of another format."""

    exit_code = 4
    exit_text = "The file is missing, damaged or of another format."


class MalformedArchive(ArchiveError):
    """The file breaks a rule of its format."""


class DamagedHeader(MalformedArchive):
    """The header of an age file breaks the format."""


class ForgedHeader(MalformedArchive):
    """The header of an age file was changed: its MAC is wrong."""


class DamagedPayload(MalformedArchive):
    """A segment of an age file is changed, truncated, or at another place."""


class NoMatchingIdentity(ArchiveError):
    """No identity opens the age file. The identity is a setting, and the file is not to blame."""

    exit_code = SettingsError.exit_code


class ArchiveLimitReached(ArchiveError):
    """The member does not fit, or the archive exceeds a limit."""


class MemberRefused(ArchiveError):
    """The member cannot be added. The archive is unchanged."""


class MemberNotFound(ArchiveError):
    """The archive has no member with this key."""


class SourceError(CafError):
    """A failure of S3."""

    exit_code = 5
    exit_text = "The S3 or web server failed."


class SourceDenied(SourceError):
    """S3 refuses the credentials, or they lack a permission."""


class BucketMissing(SourceError):
    """The bucket does not exist."""


class SourceUnreachable(SourceError):
    """S3 gave no answer, a server error, or a request to slow down, after all retries."""

    permanent = False


class ListingRefused(SourceError):
    """A listing breaks the protocol. No part of it was used."""


class ListingUnordered(ListingRefused):
    """A listing is not in byte order, or starts at another key than requested."""


class ReportRefused(SourceError):
    """An inventory report is missing, damaged, too old, or describes something else.

    No part of it was used.
    """


class ObjectReadFailed(SourceError):
    """The bytes of an object did not arrive as listed, after all retries of this run."""

    permanent = False


class ObjectUnavailable(SourceError):
    """An object cannot be archived now. The chunk continues without it.

    Attributes:
        reason: A value of `inventory.objects.SkipReason`.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class LedgerError(CafError):
    """A failure of the database."""

    exit_code = 6
    exit_text = "The database failed."


class LedgerUnreachable(LedgerError):
    """The database does not answer, or closed the connection."""

    permanent = False


class ClaimConflict(LedgerError):
    """Another plan has claimed or archived an object. A new plan will see it."""

    permanent = False


class IllegalMove(LedgerError):
    """The chunk's state does not allow this move."""


class LeaseLost(LedgerError):
    """Another run took over the lease. This move wrote nothing."""


class StoreError(CafError):
    """A failure of the place where chunks are stored."""

    exit_code = 7
    exit_text = "The store failed."


class StoreUnreachable(StoreError):
    """The store does not answer, after all retries."""

    permanent = False


class NoChainAnswer(StoreUnreachable):
    """No chain node answers, or the store's folder is away. This proves nothing about a chunk."""


class StoreAway(NoChainAnswer):
    """The folder has no marker file, or the marker file of another store."""


class ChainUnreachable(NoChainAnswer):
    """No chain node answers, or no answer is valid."""


class ChainBehind(NoChainAnswer):
    """Every node that answers is below a known block height. Its "not found" proves nothing."""


class ChainHalted(NoChainAnswer):
    """The newest block is old. Nodes accept transactions and do not include them."""


class NoProvider(StoreUnreachable):
    """Too few providers can be reached, have room, and accept the chunk."""


class PrivateAddress(StoreUnreachable):
    """A provider has a private address, which the settings forbid. This proves nothing of a chunk.

    Transient like its parent, since no chunk is damaged or lost for it.
    """

    exit_code = SettingsError.exit_code
    remedy: ClassVar[str] = (
        "set jackal.allow_private_addresses = true only for a network of your own, with providers "
        "on this machine or next to it"
    )


class NotProven(StoreError):
    """Too few copies were listed by the chain and read back in time. The message names them."""

    permanent = False


class ChunkTooLarge(StoreError):
    """No provider receives this many bytes within the time limit of an upload.

    Attributes:
        fitting_bytes: At the measured rates.
    """

    def __init__(self, message: str, *, fitting_bytes: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.fitting_bytes = fitting_bytes


class RootRefused(StoreError):
    """Providers report a Merkle root or size that differs from the post."""


class TransactionRefused(StoreError):
    """The chain refused a transaction, or included it and it failed.

    Attributes:
        codespace: The chain module that defines the code.
    """

    def __init__(self, message: str, *, code: int, codespace: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.codespace = codespace


class EmptyWallet(StoreError):
    """The chain does not know the wallet's account, or the account cannot pay."""


class NoStoragePlan(StoreError):
    """The wallet has bought no space."""


class PlanExpired(NoStoragePlan):
    """The space that the wallet bought has expired."""


class PlanTooSmall(StoreError):
    """Too little bought space is free for this post.

    Attributes:
        fitting_bytes: Free space, in bytes of one copy. 0 if unknown.
    """

    def __init__(self, message: str, *, fitting_bytes: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.fitting_bytes = fitting_bytes


class SpendCapReached(StoreError):
    """The transaction would spend more than the operator allows."""


class StoredAlready(StoreError):
    """The store has files, unknown to the ledger, that may hold a source's objects."""


class UploadsRefused(StoreError):
    """The settings and limits leave too few providers to upload to."""


class StoredChunkMissing(StoreError):
    """The store does not have the chunk, or has too few copies of it."""


class ObjectMissing(StoredChunkMissing):
    """Every provider answered that it does not have the object. A retry cannot help."""

    exit_code = 9


class NotPublic(StoreError):
    """The source has no recipients and is not marked `public = true`, so it is not archived."""


class StagingError(CafError):
    """The staging folder is full, missing, or not writable."""

    exit_code = 8
    exit_text = "The disk is full, or an output cannot be written."


class IntegrityError(CafError):
    """Bytes differ from what was recorded of them."""

    exit_code = 9
    exit_text = "Bytes differ from what was recorded."


class RowAltered(IntegrityError):
    """A row of the ledger differs from the chunk's own manifest. The chunk is not damaged."""


class HeldByOther(CafError):
    """Another live run holds the lease."""

    exit_code = 10
    exit_text = "Another run works on the chunk or source."

    def __init__(self, message: str, *, holder: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.holder = holder


class NotLocated(CafError):
    """The ledger has no such archived object, chunk or source."""

    exit_code = 11
    exit_text = "No such archived object, chunk or plan."


class AlertNotSent(CafError):
    """No receiver took an alert. Permanent, so that the tick fails; the next sends it again."""

    exit_code = 17
    exit_text = "An alert could not be sent."


class NoDaemon(CafError):
    """No Dagster daemon runs that would do the work."""

    exit_code = 16  # 12 to 15 and 18 are outcomes of commands that finished
    exit_text = "No Dagster daemon runs."
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
"""Errors that every other chunk would meet, too, until somebody changes something."""

OUTAGES: Final = (
    SourceUnreachable,
    LedgerUnreachable,
    StoreUnreachable,
    StagingError,
    PlanTooSmall,
    *HITS_EVERY_CHUNK,
)
"""Errors that do not depend on the chunk. They do not count as an attempt at it."""
