"""Searches archived logs that clp-s packed: picks the objects by their times, fetches them, and
lets clp-s search each.

The ledger has each log's first and last time. For parts of an object and adopted files, the header
is read instead. The query is passed to clp-s as it is.
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
from functools import partial
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
from caf_pipeline.ledger.protocol import LocationLookups
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.listing import PAGE_KEYS, list_objects
from caf_pipeline.retrieval.object_ranges import ObjectRanges
from caf_pipeline.retrieval.reader import Found
from caf_pipeline.retrieval.side_by_side import side_by_side
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.child_environment import child_environment
from caf_pipeline.system.folder_lock import writing_into

FOLDER_PREFIX: Final = ".searching-"

SILENT_SECONDS: Final = 600.0
"""How long clp-s may search one object without a match, and without an end: it reads some GiB of
records in that time.
"""

LINE_BYTES: Final = 64 << 20
"""Of one match, which is in memory."""

STDERR_BYTES: Final = 16 << 20
"""Of what clp-s may write into a file: all that it writes there is what it has to say of itself."""

MOST_THREADS: Final = 4
"""Objects that are fetched and searched at once, where there are as many cores; twice as many are
on the disk.
"""

_READ_BYTES: Final = 64 << 10
_SAID_BYTES: Final = 64 << 10
_ERROR: Final = re.compile(r"\[error\] (.+)")
_THROWN: Final = re.compile(r"what\(\):\s*(.+)")
_QUERY_IS_FINE: Final = "Failed to open archive"
"""What clp-s says of a file that is not there, once it has read the query."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Period:
    """The times that are asked for, in milliseconds since 1970: both inclusive, as clp-s has them;
    None: no end on that side.
    """

    first_ms: int | None = None
    last_ms: int | None = None

    @classmethod
    def between(cls, begin: datetime | None, end: datetime | None) -> Self:
        """Return the milliseconds that have anything of the time from `begin` to `end`, which have
        zones.
        """
        first, last = (
            (one - _EPOCH) / timedelta(milliseconds=1) if one else None for one in (begin, end)
        )
        return cls(
            None if first is None else math.floor(first), None if last is None else math.ceil(last)
        )

    def meets(self, first_ms: int | None, last_ms: int | None) -> bool:
        """Tell whether logs from a first to a last time may have records of the period; True where
        their times are not told.
        """
        is_late = self.last_ms is not None and first_ms is not None and first_ms > self.last_ms
        is_early = self.first_ms is not None and last_ms is not None and last_ms < self.first_ms
        return not is_late and not is_early

    @property
    def options(self) -> Sequence[str]:
        """Return what tells clp-s of it."""
        told = {"--tge": self.first_ms, "--tle": self.last_ms}
        return [f"{name}={value}" for name, value in told.items() if value is not None]


@dataclass(frozen=True, slots=True)
class SearchedLog:
    """An object that was searched.

    Attributes: location: of the object. matches: as clp-s prints them, without the line's end.
        Where the object cannot be searched, or not to its end, taking them
            raises CafError.
        has_no_times: whether it was searched without the period, since it has no times.
    """

    location: Location
    matches: Iterator[bytes]
    has_no_times: bool = False


def find_clp_s() -> Path:
    """Return the program clp-s; raises SettingsError where it is not installed."""
    spec = find_spec("yscope_clp_core")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        if (program := Path(folder).absolute() / "bin" / "clp-s").is_file():
            return program
    raise SettingsError(
        "clp-s, which searches logs, is not installed",
        hint="pip install yscope-clp-core==0.12.1b0 installs it, as the extra 'logs' does; for "
        "Linux on x86-64",
    )


class LogSearch:
    """One search.

    Used as a context: when it ends, no process of it runs, and nothing of what was fetched is left.

    Attributes: listed: objects below the prefix, so far. not_recorded: those of them whose header
        was read, since nothing records whether they are logs.
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
        """Prepare to search.

        Args: query: as clp-s takes it. staging: the folder in which a private one is made for what
            is fetched. period: which records are wanted. ignore_case: whether clp-s does.
            silent_seconds: how long clp-s may search one object without a match, and without an
            end.

        Raises:
            SettingsError: clp-s is not installed.
        """
        self.listed = self.not_recorded = 0
        self._clp_s = find_clp_s()
        # What begins with '-' would be an option to it. A space before a query means nothing.
        self._query = f" {query}" if query.startswith("-") else query
        self._staging = staging.absolute()  # clp-s runs in another folder
        self._period = period
        self._flags = ["--ignore-case"] if ignore_case else []
        self._silent_seconds = silent_seconds
        self._lock = threading.Lock()  # from `_is_over` on no file is made and no process started
        self._is_over = False
        self._closing = ExitStack()
        self._folder = staging
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._parsing = (
            threading.Lock()
        )  # metadata made to be large take memory: those of one object at a time

    def __enter__(self) -> Self:
        """Make the private folder.

        Raises:
            UsageError: clp-s refuses the query. StagingError: the folder cannot be made.
        """
        with ExitStack() as opened:
            try:
                self._staging.mkdir(parents=True, exist_ok=True)
                opened.enter_context(
                    writing_into(self._staging)
                )  # who tidies up there leaves the folder alone meanwhile
                folder = opened.enter_context(
                    tempfile.TemporaryDirectory(dir=self._staging, prefix=FOLDER_PREFIX)
                )
            except OSError as error:
                raise _no_room(self._staging, error) from error
            self._folder = Path(folder)
            opened.callback(self._end_all)  # before the folder goes
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

    def _end_all(self) -> None:
        with self._lock:
            self._is_over = True
            for process in self._processes:
                process.kill()
        for process in self._processes:
            process.wait()
            assert process.stdout
            process.stdout.close()

    # --- which objects
    # --------------------------------------------------------------------------------

    def search(
        self, lookup: LocationLookups, store: ChunkReader, source: str, prefix: str
    ) -> Iterator[SearchedLog]:
        """Yield what comes of each log below a prefix that may have records of the period, in the
        order of the keys.

        Several are fetched and searched at once. The matches of one are to be taken before the next
        is asked for.

        Raises:
            LedgerUnreachable, LedgerError. All else is an error of the object that it is about.
        """
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        picked = self._picked(lookup, source, prefix)
        with closing(side_by_side(picked, partial(self._begin, store), threads)) as begun:
            for log in begun:
                if log is not None:
                    yield log

    def _picked(
        self, lookup: LocationLookups, source: str, prefix: str
    ) -> Iterator[tuple[Location, bool]]:
        """Yield the objects that are, or may be, logs of the period, and whether they are known to
        be.
        """
        listed = list_objects(lookup, source, prefix)
        while page := list(islice(listed, PAGE_KEYS)):
            recorded = lookup.chunks_with_log_times({one.chunk for one in page})
            times = lookup.log_times(page)
            self.listed += len(page)
            for number, one in enumerate(page):
                if one.parts or one.chunk not in recorded:
                    if one.size_bytes >= HEADER_BYTES:
                        self.not_recorded += 1
                        yield one, False
                elif number in times and self._period.meets(*times[number]):
                    yield one, True

    def _begin(self, store: ChunkReader, picked: tuple[Location, bool]) -> SearchedLog | None:
        """Fetch an object and start its search; None where it turns out to be no log of the
        period.
        """
        location, is_known = picked
        found = Found(location, store)
        try:
            if not is_known and not self._is_wanted(found):
                return None
            return self._start(found)
        except CafError as error:
            return SearchedLog(location, _failing(error))
        except OSError as error:
            return SearchedLog(location, _failing(_no_room(self._staging, error)))

    def _is_wanted(self, found: Found) -> bool:
        """Tell by its header whether an object is a log that may have records of the period."""
        ranges = ObjectRanges(found)
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
            times = None  # it is searched, so that what is wrong with it is told
        return times is None or self._period.meets(*times)

    # --- one object
    # --------------------------------------------------------------------------------

    def _start(self, found: Found) -> SearchedLog:
        location = found.location
        with self._made() as file:
            path = Path(file.name)
            try:
                found.write_to(file)
                file.flush()
                with self._parsing:
                    has_times = _has_times(file, location)
                period = self._period.options if has_times else ()
                process, said = self._run(*period, *self._flags, "--", str(path), self._query)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        matches = self._matches(process, said, path)
        return SearchedLog(
            location, matches, has_no_times=bool(self._period.options) and not has_times
        )

    def _made(self) -> IO[bytes]:
        """Return a new file in the private folder."""
        with self._lock:
            self._require_going_on()
            return tempfile.NamedTemporaryFile(dir=self._folder, delete=False)

    def _require_going_on(self) -> None:
        if self._is_over:
            raise StagingError("the search is over")

    def _run(self, *arguments: str) -> "tuple[subprocess.Popen[bytes], IO[bytes]]":
        """Start a search; return its process, and the file with what it says of itself."""
        with self._lock:
            self._require_going_on()
            said = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  who waits for the process closes it
            try:
                process = subprocess.Popen(
                    [self._clp_s, "s", *arguments],
                    cwd=self._folder,
                    env=child_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    bufsize=0,
                )
            except BaseException:
                said.close()
                raise
            self._processes.add(process)
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (STDERR_BYTES, STDERR_BYTES))
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        return process, said

    def _matches(
        self, process: "subprocess.Popen[bytes]", said: IO[bytes], path: Path
    ) -> Iterator[bytes]:
        try:
            rest = yield from self._lines(process)
            if status := self._wait(process):
                raise _failed(status, said)
            if rest:  # where clp-s broke off it is half a record
                yield rest
        finally:
            self._end(process, said)
            path.unlink(missing_ok=True)

    def _lines(self, process: "subprocess.Popen[bytes]") -> Generator[bytes, None, bytes]:
        """Yield the lines that a process writes, without their ends; return what follows the last
        one's end.
        """
        assert process.stdout
        descriptor, poll, held = process.stdout.fileno(), select.poll(), bytearray()
        poll.register(descriptor, select.POLLIN)
        while True:
            if not poll.poll(self._silent_seconds * 1000):
                raise self._silent()
            piece = os.read(descriptor, _READ_BYTES)
            if not piece:
                return bytes(held)
            first, *others = piece.split(b"\n")
            held += first
            if len(held) > LINE_BYTES:
                raise ArchiveLimitReached(
                    f"a record has more than {LINE_BYTES} bytes", hint=_BY_HAND
                )
            for each in others:
                yield bytes(held)
                held[:] = each

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        try:
            return process.wait(self._silent_seconds)
        except subprocess.TimeoutExpired as error:
            raise self._silent() from error

    def _silent(self) -> CafError:
        return CafError(
            f"clp-s was stopped: it printed nothing for {self._silent_seconds:g} seconds",
            hint="set a longer --timeout",
        )

    def _end(self, process: "subprocess.Popen[bytes]", said: IO[bytes]) -> None:
        """Kill the process and wait until it has ended."""
        process.kill()
        process.wait()
        with self._lock:
            self._processes.discard(process)
        assert process.stdout
        process.stdout.close()
        said.close()

    # --- the query
    # --------------------------------------------------------------------------------

    def _require_query(self) -> None:
        """Raise UsageError where clp-s refuses the query: it reads the query before it looks for
        the archive.
        """
        missing = str(self._folder / "missing")
        try:
            process, said = self._run(*self._flags, "--", missing, self._query)
        except ValueError as error:  # a NUL, or half a surrogate pair
            raise UsageError(
                f"the query {self._query!r} cannot be given to clp-s: {error}"
            ) from error
        except OSError as error:
            raise SettingsError(
                f"{self._clp_s} cannot be run: {error.strerror}",
                hint="install yscope-clp-core again",
            ) from error
        try:
            for _ in self._lines(process):
                pass
            status = self._wait(process)
            text = _text_of(said)
        finally:
            self._end(process, said)
        if status < 0:
            raise SettingsError(
                f"{self._clp_s} cannot be run: it was ended by signal {-status}",
                hint="install yscope-clp-core again",
            )
        if _QUERY_IS_FINE not in text:
            raise UsageError(
                f"clp-s refuses the query {self._query!r}: {_reason(text)}", hint=_QUERIES
            )


_BY_HAND: Final = "fetch the file with 'caf get' and run clp-s on it"
_QUERIES: Final = (
    "docs/how-to/search-logs.md says what a query looks like: level: ERROR AND msg: *timeout*"
)


def _has_times(file: IO[bytes], location: Location) -> bool:
    """Tell whether a whole archive has times to search by.

    Raises:
        ArchiveError: it is one that clp-s cannot read, or that would fill its memory.
    """

    def read(begin: int, end: int) -> bytes:
        file.seek(begin)
        return file.read(end - begin)

    archive = read_metadata(
        read(0, FIRST_READ_BYTES), location.size_bytes, read, name="the archive"
    )
    return bool(archive.time_ranges)


def _failed(status: int, said: IO[bytes]) -> ArchiveError:
    ended = f"crashed, by signal {-status}" if status < 0 else f"ended with status {status}"
    return ArchiveError(
        f"clp-s {ended}: {_reason(_text_of(said))}",
        hint="its bytes are those that were archived: SHA-256 was compared",
    )


def _failing(error: CafError) -> Iterator[bytes]:
    yield from ()
    raise error


def _no_room(folder: Path, error: OSError) -> StagingError:
    return StagingError(
        f"the folder {folder} cannot take what is searched: {error.strerror}",
        hint="make room there, or set 'staging' elsewhere",
    )


def _text_of(said: IO[bytes]) -> str:
    """Return the end of what clp-s said of itself."""
    size_bytes = said.seek(0, os.SEEK_END)
    said.seek(max(size_bytes - _SAID_BYTES, 0))
    return said.read().decode("utf-8", "replace")


def _reason(text: str) -> str:
    """Return the sentence that says what is wrong."""
    for pattern in (_THROWN, _ERROR):
        if told := pattern.findall(text):
            return str(told[-1]).strip()
    return (text.strip().splitlines() or ["it says nothing"])[-1].strip()
