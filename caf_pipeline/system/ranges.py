"""Ranges of a file named on the command line: a local path, an http(s) URL, or an s3:// URL.

Every source answers for one state of its file: a remote one that changes between two reads is
refused by its ETag. Broken connections are resumed where they broke. No message names a URL's user,
password or query, which may be secrets.
"""

import contextlib
import os
import re
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self, TypeVar

from typing_extensions import Buffer

from caf_pipeline.errors import (
    ArchiveError,
    CafError,
    SourceDenied,
    SourceError,
    SourceUnreachable,
    UsageError,
)
from caf_pipeline.system.unreachable import Reason, reason_of

PIECE_BYTES: Final = 1 << 20
CONNECT_SECONDS: Final = 10
READ_SECONDS: Final = 60
MAX_WHOLE_BYTES: Final = 64 << 20
"""A web server that knows no ranges sends the whole file; one of up to this size is taken and kept
in memory.
"""

_BACK_OFF_SECONDS: Final = (
    0.25,
    1.0,
    3.0,
)  # before each further try of a read that came no further
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")

Result = TypeVar("Result")


class FileRanges(ABC):
    """A `caf.StreamingSource` that has a name for messages and can be closed."""

    name: str

    @abstractmethod
    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        """Return the last `size_bytes` of the file, or all of a shorter one, and the size of the
        file.
        """

    @abstractmethod
    def read_prefix(self, size_bytes: int) -> tuple[bytes, int]:
        """Return the first `size_bytes` of the file, or all of a shorter one, and the size of the
        file.
        """

    @abstractmethod
    def stream(self, start_byte: int, end_byte: int, piece_bytes: int) -> Iterator[bytes]:
        """Yield exactly `[start_byte, end_byte)` in pieces of at most `piece_bytes`, or raise."""

    def read(self, start_byte: int, end_byte: int) -> bytes:
        """Return exactly `[start_byte, end_byte)`, or raise."""
        return b"".join(self.stream(start_byte, end_byte, PIECE_BYTES))

    @abstractmethod
    def close(self) -> None:
        """Free the file or the connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_ranges(address: str, open_s3: Callable[[str], FileRanges]) -> FileRanges:
    """Open a file by path, `http://`, `https://` or `s3://bucket/key`.

    A local file of that very name comes first.

    `open_s3` opens the last kind, since this folder knows no source.

    Raises: UsageError: an address of another kind. ArchiveError: no such local file. Remote files
        are asked for at the first read.
    """
    scheme, separator, _ = address.partition("://")
    if not separator or os.path.lexists(address):
        return LocalFile(Path(address))
    if scheme in ("http", "https"):
        from caf_pipeline.system.http_file import HttpFile  # noqa: PLC0415  a sixth of a second that only URLs need

        return HttpFile(address)
    if scheme == "s3":
        return open_s3(address)
    raise UsageError(
        f"Addresses of the kind {scheme}:// are not known.",
        hint="Give a path, http(s):// or s3://bucket/key.",
    )


# --- local files
# ------------------------------------------------------------------------------------------


class LocalFile(FileRanges):
    """A regular file, held open."""

    def __init__(self, path: Path) -> None:
        """Open it; raises ArchiveError where that is not possible."""
        self.name = str(path)
        try:
            # A pipe must be refused, not waited for.
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ArchiveError(f"There is no file {self.name!r}.") from error
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = error.strerror if isinstance(error, OSError) else error
            raise ArchiveError(f"The file {self.name!r} cannot be opened: {reason}.") from error
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ArchiveError(
                f"{self.name!r} is not a regular file.", hint="An archive is read from its end."
            )
        self._size_bytes = status.st_size

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        """See `FileRanges`."""
        return self.read(max(0, self._size_bytes - size_bytes), self._size_bytes), self._size_bytes

    def read_prefix(self, size_bytes: int) -> tuple[bytes, int]:
        """See `FileRanges`."""
        return self.read(0, min(size_bytes, self._size_bytes)), self._size_bytes

    def stream(self, start_byte: int, end_byte: int, piece_bytes: int) -> Iterator[bytes]:
        """See `FileRanges`."""
        while start_byte < end_byte:
            piece = self._pread(min(piece_bytes, end_byte - start_byte), start_byte)
            start_byte += len(piece)
            yield piece

    def read(self, start_byte: int, end_byte: int) -> bytes:
        """See `FileRanges`."""
        piece = self._pread(end_byte - start_byte, start_byte) if end_byte > start_byte else b""
        if len(piece) == end_byte - start_byte:
            return piece
        return piece + super().read(
            start_byte + len(piece), end_byte
        )  # Linux reads at most 2 GiB a call

    def close(self) -> None:
        """See `FileRanges`."""
        os.close(self.descriptor)

    def _pread(self, size_bytes: int, start_byte: int) -> bytes:
        try:
            piece = os.pread(self.descriptor, size_bytes, start_byte)
        except OSError as error:
            raise ArchiveError(
                f"The file {self.name!r} cannot be read: {error.strerror}."
            ) from error
        if not piece:
            raise ArchiveError(
                f"The file {self.name!r} was cut off at byte {start_byte} while it was read."
            )
        return piece


@dataclass(frozen=True, slots=True)
class LocalRange:
    """`[start_byte, end_byte)` of a local file, to be copied into another one without passing
    through this process.
    """

    source: LocalFile
    start_byte: int
    end_byte: int

    @property
    def nbytes(self) -> int:
        """How many bytes it has, as a memoryview says it."""
        return self.end_byte - self.start_byte

    def write_to(self, file: IO[bytes]) -> None:
        """Append it to a file that is written; raises ArchiveError where the source was cut off,
        else OSError.
        """
        file.flush()
        position, at = self.start_byte, file.tell()
        while position < self.end_byte:
            count = _copied(self.source, file, position, self.end_byte - position, at)
            position, at = position + count, at + count
        file.seek(at)


def _copied(source: LocalFile, file: IO[bytes], position: int, count: int, at: int) -> int:
    """Copy up to `count` bytes to the place `at`; return how many were."""
    if hasattr(os, "copy_file_range"):  # Linux
        with contextlib.suppress(
            OSError
        ):  # file systems may refuse it; what is wrong with the file shows when it is read
            if copied := os.copy_file_range(source.descriptor, file.fileno(), count, position, at):
                return copied
    return os.pwrite(file.fileno(), source.read(position, position + min(count, PIECE_BYTES)), at)


def write_piece(file: IO[bytes], piece: Buffer | LocalRange) -> int:
    """Append a piece to a file that is written; return how many bytes it has."""
    if isinstance(piece, LocalRange):
        piece.write_to(file)
        return piece.nbytes
    file.write(piece)
    return memoryview(piece).nbytes


# --- remote files
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RangeAnswer:
    """What a server sends for a range: the file's `[first_byte, …)`, the file's size, and whether
    that is the whole file.

    Nothing is sent of a range that begins at the file's end or behind it.
    """

    first_byte: int
    size_bytes: int
    whole: bool
    pieces: Callable[[int], Iterator[bytes]]


class RemoteFile(FileRanges):
    """Ranges by requests. `_request` raises SourceUnreachable for what another try may mend."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._whole: bytes | None = None

    @abstractmethod
    def _request(self, wanted: str) -> AbstractContextManager[RangeAnswer]:
        """Ask for a range in the words of the Range header, e.g. `bytes=0-99` or `bytes=-100`."""

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        """See `FileRanges`."""
        return _retried(lambda: self._suffix(size_bytes))

    def read_prefix(self, size_bytes: int) -> tuple[bytes, int]:
        """See `FileRanges`."""
        return _retried(lambda: self._prefix(size_bytes))

    def stream(self, start_byte: int, end_byte: int, piece_bytes: int) -> Iterator[bytes]:
        """See `FileRanges`."""
        if self._whole is not None:
            yield from (
                self._whole[at : min(at + piece_bytes, end_byte)]
                for at in range(start_byte, end_byte, piece_bytes)
            )
            return
        position, failures = start_byte, 0
        while position < end_byte:
            try:
                with self._request(f"bytes={position}-{end_byte - 1}") as answer:
                    if answer.size_bytes < end_byte:
                        raise ArchiveError(
                            f"{self.name} has no byte {end_byte - 1}, which was asked for.",
                            hint="The file is cut off, or the index that was read belongs to "
                            "another file.",
                        )
                    self._expect_part(answer, position)
                    for piece in answer.pieces(piece_bytes):
                        wanted = piece[: end_byte - position]
                        position, failures = position + len(wanted), 0
                        yield wanted
                        if position == end_byte:  # the server may go on for ever
                            break
                if position < end_byte:
                    raise SourceUnreachable(
                        f"{self.name}: the answer ended at byte {position} of {end_byte}."
                    )
            except SourceUnreachable:
                if failures == len(_BACK_OFF_SECONDS):
                    raise
                time.sleep(_BACK_OFF_SECONDS[failures])
                failures += 1

    def _suffix(self, size_bytes: int) -> tuple[bytes, int]:
        with self._request(f"bytes=-{size_bytes}") as answer:
            if answer.whole and answer.size_bytes <= MAX_WHOLE_BYTES:
                return self._keep_whole(answer)[-size_bytes:], answer.size_bytes
            suffix = b"" if answer.whole else _at_most(size_bytes, answer.pieces(PIECE_BYTES))
        if answer.whole:  # some servers know only ranges that have a beginning
            return self.read(
                max(0, answer.size_bytes - size_bytes), answer.size_bytes
            ), answer.size_bytes
        if answer.size_bytes and len(suffix) != min(size_bytes, answer.size_bytes):
            raise SourceUnreachable(
                f"{self.name}: {_other_length(len(suffix), min(size_bytes, answer.size_bytes))}"
            )
        return suffix, answer.size_bytes

    def _prefix(self, size_bytes: int) -> tuple[bytes, int]:
        with self._request(f"bytes=0-{size_bytes - 1}") as answer:
            if answer.whole and answer.size_bytes <= MAX_WHOLE_BYTES:
                return self._keep_whole(answer)[:size_bytes], answer.size_bytes
            self._expect_part(answer, 0)
            prefix = _at_most(size_bytes, answer.pieces(PIECE_BYTES))[:size_bytes]
        if len(prefix) != min(size_bytes, answer.size_bytes):
            raise SourceUnreachable(
                f"{self.name}: {_other_length(len(prefix), min(size_bytes, answer.size_bytes))}"
            )
        return prefix, answer.size_bytes

    def _keep_whole(self, answer: RangeAnswer) -> bytes:
        whole = _at_most(answer.size_bytes, answer.pieces(PIECE_BYTES))
        if len(whole) != answer.size_bytes:
            raise SourceUnreachable(f"{self.name}: {_other_length(len(whole), answer.size_bytes)}")
        self._whole = whole
        return whole

    def _expect_part(self, answer: RangeAnswer, first_byte: int) -> None:
        if answer.whole:
            raise ArchiveError(
                f"{self.name}: the server sends the whole file where a part is asked for.",
                hint="Download it, and give the local file.",
            )
        if answer.first_byte != first_byte:
            raise SourceError(
                f"{self.name}: asked for byte {first_byte}, the server sent from byte "
                f"{answer.first_byte} on."
            )


def _other_length(size_bytes: int, wanted_bytes: int) -> str:
    if size_bytes > wanted_bytes:
        return f"the answer goes on behind the {wanted_bytes} bytes that it should have."
    return f"the answer ended after {size_bytes} of {wanted_bytes} bytes."


def _at_most(size_bytes: int, pieces: Iterator[bytes]) -> bytes:
    """Return all of the pieces, or what is more than `size_bytes`: an answer may be longer than it
    says, and have no end.
    """
    taken = bytearray()
    for piece in pieces:
        taken += piece
        if len(taken) > size_bytes:
            break
    return bytes(taken)


def _retried(call: Callable[[], Result]) -> Result:
    for seconds in _BACK_OFF_SECONDS:
        with contextlib.suppress(SourceUnreachable):
            return call()
        time.sleep(seconds)
    return call()


def refused(name: str, status: int, detail: str = "") -> CafError:
    """Translate an HTTP status that is neither 200, 206 nor 416."""
    said = f"{status} {detail}".strip()
    if status in (401, 403):
        return SourceDenied(
            f"{name}: access is denied ({said}).", hint="Check the credentials and what they allow."
        )
    if status in (404, 410):
        return ArchiveError(f"There is no file {name} ({said}).")
    if status == 412:
        return ArchiveError(
            f"{name} was replaced while it was read.", hint="Run the command again."
        )
    if status in (408, 425, 429) or status >= 500:
        return SourceUnreachable(
            f"{name}: the server cannot answer now ({said}).", hint="Try again later."
        )
    return SourceError(f"{name}: the server answered {said}.")


def parse_range(name: str, content_range: str) -> tuple[int, int]:
    """Return the first byte and the file's size."""
    if match := _CONTENT_RANGE.fullmatch(content_range):
        return int(match[1]), int(match[3])
    raise SourceError(
        f"{name}: the server sent a part without saying which: Content-Range is {content_range!r}."
    )


def unreachable(name: str, error: Exception, url: str, *, hint: str) -> SourceUnreachable:
    """Translate the error of a client."""
    reason = reason_of(error, url)
    said = f"{reason}: {error or type(error).__name__}" if reason is Reason.OTHER else str(reason)
    return SourceUnreachable(f"{name} {said}.", hint=hint)
