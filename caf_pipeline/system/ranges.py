"""Ranges of a local path, an http(s) URL, or an s3:// URL.

All reads are from one version of the file: a remote change is refused by the ETag. Broken
connections are resumed. No message contains a URL's user, password or query, which may be secrets.
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
"""Largest file kept in memory if a web server does not support ranges."""

_BACK_OFF_SECONDS: Final = (0.25, 1.0, 3.0)
"""Seconds before each retry of a read without progress."""

_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")

Result = TypeVar("Result")


class FileRanges(ABC):
    """A `caf.StreamingSource` with a name for messages, which can be closed."""

    name: str

    @abstractmethod
    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        """Return up to `size_bytes` from the end, and the file's size."""

    @abstractmethod
    def read_prefix(self, size_bytes: int) -> tuple[bytes, int]:
        """Return up to `size_bytes` from the start, and the file's size."""

    @abstractmethod
    def stream(self, start_byte: int, end_byte: int, piece_bytes: int) -> Iterator[bytes]:
        """Yield exactly `[start_byte, end_byte)` in pieces of at most `piece_bytes`, or raise."""

    def read(self, start_byte: int, end_byte: int) -> bytes:
        return b"".join(self.stream(start_byte, end_byte, PIECE_BYTES))

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_ranges(address: str, open_s3: Callable[[str], FileRanges]) -> FileRanges:
    """Open a path, `http://`, `https://` or `s3://bucket/key`. A local file of that name wins.

    `open_s3` opens s3:// addresses. The first request to a remote file is its first read.

    Raises:
        UsageError: The address has another scheme.
        ArchiveError: The local file does not exist.
    """
    scheme, separator, _ = address.partition("://")
    if not separator or os.path.lexists(address):
        return LocalFile(Path(address))
    if scheme in ("http", "https"):
        # A sixth of a second, which only URLs need.
        from caf_pipeline.system.http_file import HttpFile  # noqa: PLC0415

        return HttpFile(address)
    if scheme == "s3":
        return open_s3(address)
    raise UsageError(
        f"The scheme {scheme}:// is not supported.",
        hint="Pass a path, http(s):// or s3://bucket/key.",
    )


# --- local files


class LocalFile(FileRanges):
    """An open regular file."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            # O_NONBLOCK: opening a pipe must not block.
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
                f"{self.name!r} is not a regular file.", hint="Reading starts at its end."
            )
        self._size_bytes = status.st_size

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        return self.read(max(0, self._size_bytes - size_bytes), self._size_bytes), self._size_bytes

    def read_prefix(self, size_bytes: int) -> tuple[bytes, int]:
        return self.read(0, min(size_bytes, self._size_bytes)), self._size_bytes

    def stream(self, start_byte: int, end_byte: int, piece_bytes: int) -> Iterator[bytes]:
        while start_byte < end_byte:
            piece = self._pread(min(piece_bytes, end_byte - start_byte), start_byte)
            start_byte += len(piece)
            yield piece

    def read(self, start_byte: int, end_byte: int) -> bytes:
        piece = self._pread(end_byte - start_byte, start_byte) if end_byte > start_byte else b""
        if len(piece) == end_byte - start_byte:
            return piece
        # Linux reads at most 2 GiB in a call.
        return piece + super().read(start_byte + len(piece), end_byte)

    def close(self) -> None:
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
                f"The file {self.name!r} was truncated: it has no byte {start_byte}."
            )
        return piece


@dataclass(frozen=True, slots=True)
class LocalRange:
    """A range of a local file, which the kernel can copy into another file."""

    source: LocalFile
    start_byte: int
    end_byte: int

    @property
    def nbytes(self) -> int:
        return self.end_byte - self.start_byte

    def write_to(self, file: IO[bytes]) -> None:
        file.flush()
        position, at = self.start_byte, file.tell()
        while position < self.end_byte:
            count = _copied(self.source, file, position, self.end_byte - position, at)
            position, at = position + count, at + count
        file.seek(at)


def _copied(source: LocalFile, file: IO[bytes], position: int, count: int, at: int) -> int:
    if hasattr(os, "copy_file_range"):  # Linux
        # File systems may refuse this. Reading the file then raises its errors.
        with contextlib.suppress(OSError):
            if copied := os.copy_file_range(source.descriptor, file.fileno(), count, position, at):
                return copied
    return os.pwrite(file.fileno(), source.read(position, position + min(count, PIECE_BYTES)), at)


def write_piece(file: IO[bytes], piece: Buffer | LocalRange) -> int:
    """Append a piece; return its bytes."""
    if isinstance(piece, LocalRange):
        piece.write_to(file)
        return piece.nbytes
    file.write(piece)
    return memoryview(piece).nbytes


# --- remote files


@dataclass(frozen=True, slots=True)
class RangeAnswer:
    """A server's answer: `[first_byte, …)` of the file, its size, and whether this is all of it.

    A range beyond the end of the file has no pieces.
    """

    first_byte: int
    size_bytes: int
    whole: bool
    pieces: Callable[[int], Iterator[bytes]]


class RemoteFile(FileRanges):
    """A file that is read by requests. `_request` raises SourceUnreachable if a retry may help."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._whole: bytes | None = None

    @abstractmethod
    def _request(self, byte_range: str) -> AbstractContextManager[RangeAnswer]:
        """Request a range as in the Range header, e.g. `bytes=-100`."""

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        return _retried(lambda: self._suffix(size_bytes))

    def read_prefix(self, size_bytes: int) -> tuple[bytes, int]:
        return _retried(lambda: self._prefix(size_bytes))

    def stream(self, start_byte: int, end_byte: int, piece_bytes: int) -> Iterator[bytes]:
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
                            f"{self.name} has no byte {end_byte - 1}.",
                            hint="The file is truncated, or the index belongs to another file.",
                        )
                    self._expect_part(answer, position)
                    for piece in answer.pieces(piece_bytes):
                        part = piece[: end_byte - position]
                        position, failures = position + len(part), 0
                        yield part
                        if position == end_byte:  # the answer may be endless
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
        if answer.whole:  # Some servers support only ranges with a start.
            start_byte = max(0, answer.size_bytes - size_bytes)
            return self.read(start_byte, answer.size_bytes), answer.size_bytes
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
                f"{self.name}: the server does not support ranges.",
                hint="Download the file, and pass the local path.",
            )
        if answer.first_byte != first_byte:
            raise SourceError(
                f"{self.name}: the server sent bytes from {answer.first_byte} on instead of "
                f"{first_byte}."
            )


def _other_length(size_bytes: int, expected_bytes: int) -> str:
    if size_bytes > expected_bytes:
        return f"the answer is longer than {expected_bytes} bytes."
    return f"the answer ended after {size_bytes} of {expected_bytes} bytes."


def _at_most(size_bytes: int, pieces: Iterator[bytes]) -> bytes:
    """Return all pieces, or slightly more than `size_bytes`."""
    received = bytearray()
    for piece in pieces:
        received += piece
        if len(received) > size_bytes:
            break
    return bytes(received)


def _retried(call: Callable[[], Result]) -> Result:
    for seconds in _BACK_OFF_SECONDS:
        with contextlib.suppress(SourceUnreachable):
            return call()
        time.sleep(seconds)
    return call()


def refused(name: str, status: int, detail: str = "") -> CafError:
    """Translate a failing HTTP status."""
    answer = f"{status} {detail}".strip()
    if status in (401, 403):
        return SourceDenied(
            f"{name}: access is denied ({answer}).",
            hint="Check the credentials and their permissions.",
        )
    if status in (404, 410):
        return ArchiveError(f"There is no file {name} ({answer}).")
    if status == 412:
        return ArchiveError(
            f"{name} was replaced while it was read.", hint="Run the command again."
        )
    if status in (408, 425, 429) or status >= 500:
        return SourceUnreachable(
            f"{name}: the server is not available ({answer}).", hint="Try again later."
        )
    return SourceError(f"{name}: the server answered {answer}.")


def parse_range(name: str, content_range: str) -> tuple[int, int]:
    """Return the first byte and the size."""
    if match := _CONTENT_RANGE.fullmatch(content_range):
        return int(match[1]), int(match[3])
    raise SourceError(f"{name}: the server sent an invalid Content-Range, {content_range!r}.")


def unreachable(name: str, error: Exception, url: str, *, hint: str) -> SourceUnreachable:
    """Translate a client's error."""
    reason = reason_of(error, url)
    problem = f"{reason}: {error or type(error).__name__}" if reason is Reason.OTHER else reason
    return SourceUnreachable(f"{name} {problem}.", hint=hint)
