"""Searches archived logs that clp-s compressed: picks objects by time, fetches and searches them.

The ledger has the times of most logs; otherwise the header is read.
"""

import math
import os
import re
import resource
import select
import subprocess
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from caf_pipeline.errors import (
    ArchiveError,
    ArchiveLimitReached,
    CafError,
    SettingsError,
    StagingError,
    UsageError,
)
from caf_pipeline.formats.clps import (
    FIRST_READ_BYTES,
    HEADER_BYTES,
    begins_as_archive,
    read_metadata,
    read_times,
)
from caf_pipeline.ledger.records import Location, LocationLookups
from caf_pipeline.retrieval.listing import PAGE_KEYS, list_objects
from caf_pipeline.retrieval.object_ranges import ObjectRanges
from caf_pipeline.retrieval.reader import ArchivedObject
from caf_pipeline.retrieval.side_by_side import side_by_side
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.child_environment import child_environment
from caf_pipeline.system.folder_lock import writing_into
from caf_pipeline.system.secret_files import make_private

FOLDER_PREFIX: Final = ".searching-"

SILENT_SECONDS: Final = 600.0
"""Seconds without a match or an end; clp-s reads some GiB in them."""

LINE_BYTES: Final = 64 << 20
"""Size limit of one match, which is held in memory."""

STDERR_BYTES: Final = 16 << 20

MOST_THREADS: Final = 4
"""Objects searched concurrently; twice as many are on the disk."""

_READ_BYTES: Final = 64 << 10
_STDERR_TAIL_BYTES: Final = 64 << 10
_ERROR: Final = re.compile(r"\[error\] (.+)")
_THROWN: Final = re.compile(r"what\(\):\s*(.+)")
_QUERY_ACCEPTED: Final = "Failed to open archive"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Period:
    """Milliseconds since 1970, both ends inclusive, as in clp-s. None is open-ended."""

    first_ms: int | None = None
    last_ms: int | None = None

    @classmethod
    def between(cls, begin: datetime | None, end: datetime | None) -> Self:
        first, last = (
            (moment - _EPOCH) / timedelta(milliseconds=1) if moment else None
            for moment in (begin, end)
        )
        return cls(
            None if first is None else math.floor(first), None if last is None else math.ceil(last)
        )

    def meets(self, first_ms: int | None, last_ms: int | None) -> bool:
        is_late = self.last_ms is not None and first_ms is not None and first_ms > self.last_ms
        is_early = self.first_ms is not None and last_ms is not None and last_ms < self.first_ms
        return not is_late and not is_early

    @property
    def options(self) -> Sequence[str]:
        values = {"--tge": self.first_ms, "--tle": self.last_ms}
        return [f"{name}={value}" for name, value in values.items() if value is not None]


@dataclass(frozen=True, slots=True)
class SearchedLog:
    """A searched object. Iterating `matches` raises CafError if it cannot be searched to its end.

    `has_no_times` is True if the period was ignored.
    """

    location: Location
    matches: Iterator[bytes]
    has_no_times: bool = False


def find_clp_s() -> Path:
    """Return the path of clp-s; raises SettingsError."""
    spec = find_spec("yscope_clp_core")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        if (program := Path(folder).absolute() / "bin" / "clp-s").is_file():
            return program
    raise SettingsError(
        "clp-s, which searches logs, is not installed",
        hint="'pip install yscope-clp-core==0.12.1b0' installs it, and so does the extra 'logs'; "
        "it needs Linux on x86-64",
    )


class LogSearch:
    """One search. The context manager kills its processes and deletes its files.

    `not_recorded` counts objects whose header was read.
    """

    def __init__(
        self,
        query: str,
        staging: Path,
        *,
        period: Period = Period(),
        ignore_case: bool = False,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        """`silent_seconds` is the timeout for a match."""
        self.listed = self.not_recorded = 0
        self._clp_s = find_clp_s()
        # clp-s would parse a leading '-' as an option. A space before a query means nothing.
        self._query = f" {query}" if query.startswith("-") else query
        self._staging = staging.absolute()  # clp-s runs in another folder
        self._period = period
        self._flags = ["--ignore-case"] if ignore_case else []
        self._silent_seconds = silent_seconds
        self._lock = threading.Lock()  # once `_is_over`, no file or process is created
        self._is_over = False
        self._closing = ExitStack()
        self._folder = staging
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._parsing = threading.Lock()  # hostile metadata may take much memory: one at a time

    def __enter__(self) -> Self:
        """Raises UsageError if clp-s refuses the query."""

        def kill_all() -> None:
            with self._lock:
                self._is_over = True
                for process in self._processes:
                    process.kill()
            for process in self._processes:
                process.wait()
                assert process.stdout
                process.stdout.close()

        with ExitStack() as opened:
            try:
                make_private(self._staging)
                # The lock keeps a concurrent cleanup away from the folder.
                opened.enter_context(writing_into(self._staging))
                folder = opened.enter_context(
                    tempfile.TemporaryDirectory(dir=self._staging, prefix=FOLDER_PREFIX)
                )
            except OSError as error:
                raise _no_room(self._staging, error) from error
            self._folder = Path(folder)
            opened.callback(kill_all)  # before the folder is deleted
            self._require_query()
            self._closing = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.close()

    def search(
        self, lookup: LocationLookups, store: ChunkReader, source: str, prefix: str
    ) -> Iterator[SearchedLog]:
        """Yield each log that may have records of the period, in key order.

        Logs are searched concurrently. Read the matches of each before you take the next one.
        """

        def begin(candidate: tuple[Location, bool]) -> SearchedLog | None:
            location, is_log = candidate
            archived = ArchivedObject(location, store)
            try:
                return self._start(archived) if is_log or self._may_match(archived) else None
            except CafError as error:
                return SearchedLog(location, _raise_later(error))
            except OSError as error:
                return SearchedLog(location, _raise_later(_no_room(self._staging, error)))

        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        candidates = self._candidates(lookup, source, prefix)
        with closing(side_by_side(candidates, begin, threads)) as logs:
            yield from filter(None, logs)

    def _candidates(
        self, lookup: LocationLookups, source: str, prefix: str
    ) -> Iterator[tuple[Location, bool]]:
        listed = list_objects(lookup, source, prefix)
        while page := list(islice(listed, PAGE_KEYS)):
            recorded = lookup.chunks_with_log_times({location.chunk for location in page})
            times = lookup.log_times(page)
            self.listed += len(page)
            for number, location in enumerate(page):
                if location.parts or location.chunk not in recorded:
                    if location.size_bytes >= HEADER_BYTES:
                        self.not_recorded += 1
                        yield location, False
                elif number in times and self._period.meets(*times[number]):
                    yield location, True

    def _may_match(self, archived: ArchivedObject) -> bool:
        ranges = ObjectRanges(archived)
        first, size_bytes = ranges.read_prefix(FIRST_READ_BYTES)
        if not begins_as_archive(first):
            return False
        try:
            times = read_times(
                size_bytes,
                lambda begin, end: (
                    first[begin:end] if end <= len(first) else ranges.read(begin, end)
                ),
            )
        except ArchiveError:
            return True  # the search reports what is wrong with it
        return times is None or self._period.meets(*times)

    def _start(self, archived: ArchivedObject) -> SearchedLog:
        location = archived.location
        with self._lock:
            self._require_running()
            temporary = tempfile.NamedTemporaryFile(dir=self._folder, delete=False)  # noqa: SIM115

        def read(begin: int, end: int) -> bytes:
            temporary.seek(begin)
            return temporary.read(end - begin)

        with temporary:
            path = Path(temporary.name)
            try:
                archived.write_to(temporary)
                temporary.flush()
                with self._parsing:  # raises ArchiveError if clp-s would fail, or fill the memory
                    metadata = read_metadata(
                        read(0, FIRST_READ_BYTES), location.size_bytes, read, name="the archive"
                    )
                has_times = bool(metadata.time_ranges)
                period = self._period.options if has_times else ()
                process, stderr = self._run(*period, *self._flags, "--", str(path), self._query)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        matches = self._matches(process, stderr, path)
        return SearchedLog(
            location, matches, has_no_times=bool(self._period.options) and not has_times
        )

    def _require_running(self) -> None:
        if self._is_over:
            raise StagingError("the search is over")

    def _run(self, *arguments: str) -> "tuple[subprocess.Popen[bytes], IO[bytes]]":
        with self._lock:
            self._require_running()
            stderr = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - `_end` closes it
            try:
                process = subprocess.Popen(
                    [self._clp_s, "s", *arguments],
                    cwd=self._folder,
                    env=child_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    bufsize=0,
                )
            except BaseException:
                stderr.close()
                raise
            self._processes.add(process)
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (STDERR_BYTES, STDERR_BYTES))
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        return process, stderr

    def _matches(
        self, process: "subprocess.Popen[bytes]", stderr: IO[bytes], path: Path
    ) -> Iterator[bytes]:
        try:
            rest = yield from self._lines(process)
            if status := self._wait(process):
                ended = f"crashed, by signal {-status}" if status < 0 else f"exited with {status}"
                raise ArchiveError(
                    f"clp-s {ended}: {_reason(_tail(stderr))}",
                    hint="its bytes are the archived bytes: their SHA-256 was verified",
                )
            if rest:  # after a failure it would be half a record
                yield rest
        finally:
            self._end(process, stderr)
            path.unlink(missing_ok=True)

    def _lines(self, process: "subprocess.Popen[bytes]") -> Generator[bytes, None, bytes]:
        """Lines have no ends. Returns an unfinished last line."""
        assert process.stdout
        descriptor, poll, line = process.stdout.fileno(), select.poll(), bytearray()
        poll.register(descriptor, select.POLLIN)
        while True:
            if not poll.poll(self._silent_seconds * 1000):
                raise self._timeout()
            piece = os.read(descriptor, _READ_BYTES)
            if not piece:
                return bytes(line)
            first, *others = piece.split(b"\n")
            line += first
            if len(line) > LINE_BYTES:
                raise ArchiveLimitReached(
                    f"a record has more than {LINE_BYTES} bytes",
                    hint="fetch the file with 'caf get' and run clp-s on it",
                )
            for other in others:
                yield bytes(line)
                line[:] = other

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        try:
            return process.wait(self._silent_seconds)
        except subprocess.TimeoutExpired as error:
            raise self._timeout() from error

    def _timeout(self) -> CafError:
        return CafError(
            f"clp-s was stopped: it printed nothing for {self._silent_seconds:g} seconds",
            hint="set a longer --timeout",
        )

    def _end(self, process: "subprocess.Popen[bytes]", stderr: IO[bytes]) -> None:
        process.kill()
        process.wait()
        with self._lock:
            self._processes.discard(process)
        assert process.stdout
        process.stdout.close()
        stderr.close()

    def _require_query(self) -> None:
        """Search a missing archive: clp-s parses the query first."""
        missing = str(self._folder / "missing")
        try:
            process, stderr = self._run(*self._flags, "--", missing, self._query)
        except ValueError as error:  # a NUL, or half a surrogate pair
            raise UsageError(f"clp-s cannot receive the query {self._query!r}: {error}") from error
        except OSError as error:
            raise SettingsError(
                f"{self._clp_s} cannot be run: {error.strerror}",
                hint="install yscope-clp-core again",
            ) from error
        try:
            for _ in self._lines(process):
                pass
            status = self._wait(process)
            text = _tail(stderr)
        finally:
            self._end(process, stderr)
        if status < 0:
            raise SettingsError(
                f"{self._clp_s} cannot be run: it was ended by signal {-status}",
                hint="install yscope-clp-core again",
            )
        if _QUERY_ACCEPTED not in text:
            raise UsageError(
                f"clp-s refuses the query {self._query!r}: {_reason(text)}",
                hint="'caf help docs/how-to/search-logs.md' describes queries such as: level: "
                "ERROR AND msg: *timeout*",
            )


def _raise_later(error: CafError) -> Iterator[bytes]:
    yield from ()
    raise error


def _no_room(folder: Path, error: OSError) -> StagingError:
    return StagingError(
        f"the folder {folder} cannot be written: {error.strerror}",
        hint="make room there, or set 'staging' to another folder",
    )


def _tail(stderr: IO[bytes]) -> str:
    size_bytes = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(size_bytes - _STDERR_TAIL_BYTES, 0))
    return stderr.read().decode("utf-8", "replace")


def _reason(text: str) -> str:
    for pattern in (_THROWN, _ERROR):
        if reasons := pattern.findall(text):
            return str(reasons[-1]).strip()
    return (text.strip().splitlines() or ["no reason given"])[-1].strip()
