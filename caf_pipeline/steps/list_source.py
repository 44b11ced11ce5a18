"""Lists a source with several threads into sorted Parquet pieces, and resumes interrupted listings.

Each thread lists a range of keys. An idle thread splits the longest-running range at a key of
`inventory.key_split`; a useless split costs one request. If the server does not list in byte order,
ListingUnordered is raised.

Source: ListObjectsV2 and ListObjectVersions in the Amazon S3 API Reference.
"""

import contextlib
import itertools
import json
import shutil
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final, Self
from urllib.parse import quote_from_bytes, unquote_to_bytes

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.errors import IntegrityError, ListingUnordered
from caf_pipeline.inventory.key_split import split_key, text_of
from caf_pipeline.inventory.objects import S3Object, VersionCounts
from caf_pipeline.inventory.snapshot import (
    RETAKE_HINT,
    SNAPSHOT_SCHEMA,
    open_parquet,
    snapshot_batch,
)
from caf_pipeline.run_context import RunContext
from caf_pipeline.source.protocol import LastPage
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.folder_lock import alone_in
from caf_pipeline.system.parquet import ROWS_PER_GROUP, WholeParquet, stated, translate_errors

MAX_RESUMED_AGE: Final = timedelta(days=1)
"""Older listings are not resumed, since they lack later objects."""

PAGES_BEFORE_A_SPLIT: Final = 2
"""Pages of a range before it is split, plus one for every four useless splits.

The first useful split of 100,000 keys in folders of 1,000 is the fifth.
"""

SAMPLE_EVERY: Final = 10
"""One of so many keys shows which characters occur."""

PIECE_OBJECTS: Final = ROWS_PER_GROUP
"""Objects in a piece: 66 requests, which a crash costs per range.

Listing a smaller listing again is as fast as resuming it.
"""

MEETING_CHECKS: Final = 3
"""Checks of a meeting, since the bucket may change meanwhile."""

PROGRESS_SECONDS: Final = 60.0
"""Seconds between two progress messages, as in `caf run`."""

FOLDER: Final = ".listing-"
_RECORD: Final = "listing.json"
_COVERS: Final = "caf.covers"


@dataclass(frozen=True, slots=True)
class ListingTerms:
    """The scope of a listing, and of its pieces.

    `after` and `until` are percent-encoded: exclusive, and inclusive or None for all.
    """

    address: str
    after: str
    until: str | None
    all_versions: bool


@dataclass(frozen=True, slots=True)
class ListingStart:
    """The start of a listing, before its first request.

    `listed_at` is by this machine's clock, `taken_at` by S3's.
    """

    listed_at: datetime
    taken_at: datetime
    by_version: bool


@dataclass(slots=True, eq=False)
class _Range:
    """Keys greater than `after`, up to and including `until` (None: all), and their progress.

    `following` is the first key behind the range, once it has `ended`.
    """

    after: bytes
    until: bytes | None
    last: bytes = b""
    first: bytes | None = None
    following: bytes | None = None
    ended: bool = False
    pages: int = 0
    useless_splits: int = 0
    split_from: "_Range | None" = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A file with all keys greater than `after`, up to and including `through`.

    Later keys in it do not count.
    """

    path: Path
    rows: int
    after: bytes
    through: bytes | None
    first: bytes | None
    last: bytes | None
    following: bytes | None
    ended: bool
    left_out: VersionCounts


@contextlib.contextmanager
def listing_folder(
    folder: Path, terms: ListingTerms, newest: datetime | None, *, resume: bool = True
) -> Iterator["PieceFolder"]:
    """Give the locked folder of an interrupted listing with these terms, or a new one.

    Removes folders that are old, or older than the `newest` whole inventory. After an error, a
    folder that is worth resuming stays.
    """
    with translate_errors(folder), contextlib.ExitStack() as stack:
        for path in sorted(folder.glob(f"{FOLDER}*")):
            with contextlib.ExitStack() as lock:
                if not _lock(path, lock):
                    continue
                record = read_record(path, newest)
                if record is None:
                    shutil.rmtree(path, ignore_errors=True)
                elif resume and record[0] == terms:
                    stack.enter_context(lock.pop_all())
                    pieces = PieceFolder(path, record[1])
                    break
        else:
            # Before the lock, another process may take the folder for an old one and remove it.
            while not _lock(path := Path(mkdtemp(prefix=FOLDER, dir=folder)), stack):
                pass
            pieces = PieceFolder(path, None, terms)
        try:
            yield pieces
        except BaseException:
            if read_record(path, None) is None:
                shutil.rmtree(path, ignore_errors=True)
            raise
        shutil.rmtree(path, ignore_errors=True)


def _lock(path: Path, stack: contextlib.ExitStack) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return stack.enter_context(alone_in(path)) and path.exists()
    return False


def read_record(path: Path, newest: datetime | None) -> tuple[ListingTerms, ListingStart] | None:
    """Return terms and start of a listing; None if it is not worth resuming."""
    try:
        record = json.loads((path / _RECORD).read_text(encoding="utf-8"))
        start = ListingStart(
            datetime.fromisoformat(record["listed_at"]),
            datetime.fromisoformat(record["taken_at"]),
            record["by_version"],
        )
        terms = ListingTerms(**record["terms"])
        listed = sum(_described(piece)["rows"] for piece in path.glob("*.parquet"))
    except (OSError, ValueError, KeyError, TypeError):  # incomplete, damaged, or of another version
        return None
    # A start in the future means that this machine's clock was wrong.
    too_old = abs(datetime.now(UTC) - start.listed_at) > MAX_RESUMED_AGE or (
        newest is not None and newest > start.listed_at
    )
    return None if too_old or listed < PIECE_OBJECTS else (terms, start)


def _described(piece: Path) -> dict[str, Any]:
    return json.loads(stated(pq.read_metadata(piece), _COVERS))  # type: ignore[no-any-return]


class PieceFolder:
    """The pieces of one listing. Several threads may write."""

    def __init__(
        self, path: Path, start: ListingStart | None, terms: ListingTerms | None = None
    ) -> None:
        self.path = path
        self.start = start
        self._terms = terms
        # Numbers of unpublished pieces may be missing.
        self._numbers = itertools.count(
            1 + max((int(piece.stem) for piece in path.glob("*.parquet")), default=0)
        )

    def begin(self, start: ListingStart) -> ListingStart:
        assert self._terms is not None
        self.start = start
        record = {"terms": asdict(self._terms), **asdict(start)}
        with WholeFile(self.path / _RECORD) as whole:
            whole.file.write(json.dumps(record, default=datetime.isoformat).encode())
        return start

    def pieces(self) -> list[_Piece]:
        pieces = []
        for path in self.path.glob("*.parquet"):
            described = _described(path)
            rows, ended = described.pop("rows"), described.pop("ended")
            left_out = VersionCounts(**described.pop("left_out"))
            covers = {
                name: None if text is None else unquote_to_bytes(text)
                for name, text in described.items()
            }
            after = covers.pop("after") or b""
            pieces.append(_Piece(path, rows, after, **covers, ended=ended, left_out=left_out))
        return sorted(pieces, key=lambda piece: piece.after)

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows in key order.

        A damaged piece raises IntegrityError and is removed, so that it is listed again.
        """
        for piece in self.pieces():
            rows = 0
            try:
                with open_parquet(piece.path) as file:
                    if file.schema_arrow.remove_metadata() != SNAPSHOT_SCHEMA:
                        raise IntegrityError(
                            f"the columns of {piece.path} are not those of a snapshot",
                            hint=RETAKE_HINT,
                        )
                    for batch in file.iter_batches():
                        rows += batch.num_rows
                        if (
                            piece.through is not None
                            and batch.num_rows
                            and batch["key"][-1].as_py() > piece.through
                        ):
                            batch = batch.filter(  # noqa: PLW2901
                                pc.less_equal(batch["key"], pa.scalar(piece.through, pa.binary()))
                            )
                        yield batch
                if rows != piece.rows:
                    raise IntegrityError(
                        f"{piece.path} has {rows} rows and declares {piece.rows}", hint=RETAKE_HINT
                    )
            except IntegrityError:
                piece.path.unlink(missing_ok=True)
                raise

    def left_out(self) -> VersionCounts:
        return sum((piece.left_out for piece in self.pieces()), VersionCounts())

    def new_piece(self) -> WholeParquet:
        return WholeParquet(self.path / f"{next(self._numbers):06}.parquet", SNAPSHOT_SCHEMA)


class _PieceWriter:
    """Writes pieces that have all versions of their keys. The next page may have more."""

    def __init__(self, folder: PieceFolder, after: bytes, *, all_versions: bool) -> None:
        self._folder = folder
        self._after = after
        self._all_versions = all_versions
        self._file: WholeParquet | None = None
        self._first: bytes | None = None
        self._last: bytes | None = None
        self._whole: bytes | None = None  # the last key with all of its versions
        self._left_out = VersionCounts()  # up to that key
        self._pending = VersionCounts()  # of the last key

    def add(self, page: Sequence[S3Object]) -> None:
        begin = bisect_left(page, page[-1].key, key=lambda obj: obj.key)  # of the last key
        if begin or page[0].key != self._last:
            self._write(page[:begin])
            self._whole = page[begin - 1].key if begin else self._last
            self._left_out, self._pending = self._left_out + self._pending, VersionCounts()
            if self._file is not None and self._file.row_count >= PIECE_OBJECTS:
                self.close()
        self._write(page[begin:])

    def _write(self, objects: Sequence[S3Object]) -> None:
        if not objects:
            return
        self._first = self._first or objects[0].key
        self._last = objects[-1].key
        kept, left_out = drop_old_versions(objects, all_versions=self._all_versions)
        self._pending += left_out
        if kept:
            self._file = self._file or self._folder.new_piece()
            self._file.write(snapshot_batch(kept))

    def close(self) -> None:
        if self._file is not None and self._whole is not None:
            self._publish(self._whole, self._whole, None, ended=False)

    def end(self, through: bytes | None, following: bytes | None) -> None:
        self._left_out += self._pending
        self._publish(through, self._last, following, ended=True)

    def _publish(
        self, through: bytes | None, last: bytes | None, following: bytes | None, *, ended: bool
    ) -> None:
        file = self._file or self._folder.new_piece()
        covers = {
            "after": self._after,
            "through": through,
            "first": self._first,
            "last": last,
            "following": following,
        }
        described: dict[str, Any] = {
            name: key if key is None else quote_from_bytes(key) for name, key in covers.items()
        }
        described |= {"rows": file.row_count, "ended": ended, "left_out": asdict(self._left_out)}
        file.close({_COVERS: json.dumps(described)})
        file.publish()
        self._after = through or b""
        self._file = self._first = self._last = self._whole = None
        self._left_out = VersionCounts()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.abort()


def drop_old_versions(
    listed: Sequence[S3Object], *, all_versions: bool
) -> tuple[Sequence[S3Object], VersionCounts]:
    """Return the objects for the snapshot, and the counts of the others."""
    if all_versions:
        return listed, VersionCounts()
    return [obj for obj in listed if obj.is_latest and not obj.is_delete_marker], VersionCounts.of(
        listed
    )


@dataclass
class ParallelListing:
    """One listing of a source by several threads.

    `after` is exclusive, `until` inclusive or None. `listed` includes an earlier process.
    """

    context: RunContext
    folder: PieceFolder
    by_version: bool
    after: bytes
    until: bytes | None
    threads: int
    listed: int = 0
    _waiting: list[_Range] = field(default_factory=list)
    _active: list[_Range] = field(default_factory=list)
    _started: list[threading.Thread] = field(default_factory=list)
    _alphabet: set[str] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _failure: BaseException | None = None

    def run(self) -> None:
        """Return once the pieces cover everything.

        Raises ListingUnordered, or a SourceError after keeping the listed pages.
        """
        position: bytes | None = self.after
        for piece in self.folder.pieces():
            self.listed += piece.rows
            if position is not None and piece.after > position:
                self._waiting.append(_Range(position, piece.after, last=position))
            position = piece.through
        if position is not None and (self.until is None or position < self.until):
            self._waiting.append(_Range(position, self.until, last=position))
        try:
            with self._changed:
                self._start()
                while self._failure is None and (self._waiting or self._active):
                    with self.context.waits.waiting(
                        f"the listing of '{self.context.source}', which has {self.listed:,} "
                        "objects so far",
                        ends_by="its last page ends it",
                        grace=PROGRESS_SECONDS
                        if len(self._started) < 2 and not self.listed
                        else PROGRESS_SECONDS / 2,
                    ):
                        self._changed.wait_for(
                            lambda: self._failure or not (self._waiting or self._active),
                            PROGRESS_SECONDS,
                        )
        except BaseException as error:  # an interrupt: the threads end after their page
            self._fail(error)
            raise
        for thread in self._started:
            thread.join()
        if self._failure is not None:
            raise self._failure
        self._require_meetings()

    def _start(self) -> None:
        """The lock must be held."""
        if len(self._started) < self.threads and (self._waiting or self._splittable()):
            thread = threading.Thread(
                target=self._work, name=f"listing-{len(self._started)}", daemon=True
            )
            self._started.append(thread)
            thread.start()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (key_range := self._next_range()) is not None:
                with translate_errors(self.folder.path):
                    self._list_range(key_range)
                with self._changed:
                    self._active.remove(key_range)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._fail(error)

    def _next_range(self) -> _Range | None:
        with self._changed:
            while self._failure is None:
                if self._waiting:
                    key_range = self._waiting.pop()
                elif not self._active:
                    return None
                elif (split := self._split()) is not None:
                    key_range = split
                else:
                    self._changed.wait()
                    continue
                self._active.append(key_range)
                self._start()
                return key_range
        return None

    def _splittable(self) -> list[_Range]:
        return [
            key_range
            for key_range in self._active
            if not key_range.ended
            and key_range.pages >= PAGES_BEFORE_A_SPLIT + key_range.useless_splits // 4
        ]

    def _split(self) -> _Range | None:
        for key_range in sorted(self._splittable(), key=lambda item: -item.pages):
            key_range.pages = 0
            at = split_key(
                key_range.first or key_range.last,
                key_range.last,
                key_range.until,
                alphabet=self._alphabet,
                prefix=self.context.source_settings.prefix,
                jump=key_range.useless_splits % 2 == 1,
            )
            if at is not None:
                behind = _Range(at, key_range.until, last=at, split_from=key_range)
                key_range.until = at
                return behind
        return None

    def _list_range(self, key_range: _Range) -> None:
        with _PieceWriter(
            self.folder, key_range.after, all_versions=self.context.all_versions
        ) as writer:
            for page in self._pages(key_range.after):
                objects = self._take_page(key_range, page)
                if objects:
                    writer.add(objects)
                if key_range.ended or self._failure is not None:
                    break
            else:
                self._end_range(key_range, None)
            if self._failure is not None and not isinstance(self._failure, Exception):
                return  # an interrupt: another process may use the folder already
            if key_range.ended:
                writer.end(key_range.until, key_range.following)
            else:
                writer.close()

    def _take_page(self, key_range: _Range, page: Sequence[S3Object]) -> Sequence[S3Object]:
        with self._changed:
            within = (
                len(page)
                if key_range.until is None
                else bisect_right(page, key_range.until, key=lambda obj: obj.key)
            )
            objects = page[:within]
            if objects:
                if key_range.split_from is not None:
                    key_range.split_from.useless_splits = 0
                    key_range.split_from = None
                key_range.first = key_range.first or objects[0].key
                key_range.last = objects[-1].key
                key_range.pages += 1
                kept, _ = drop_old_versions(objects, all_versions=self.context.all_versions)
                self.listed += len(kept)
                self._alphabet.update(*(text_of(obj.key) for obj in objects[::SAMPLE_EVERY]))
            if within < len(page):
                self._end_range(key_range, page[within].key)
            elif isinstance(page, LastPage):  # at once, so that no thread splits off an empty range
                self._end_range(key_range, None)
            self._changed.notify_all()
            self._start()
            return objects

    def _end_range(self, key_range: _Range, following: bytes | None) -> None:
        with self._changed:
            key_range.following, key_range.ended = following, True
            if key_range.split_from is not None:
                key_range.split_from.useless_splits += 1

    # --- order ------------------------------------------------------------------------------------

    def _require_meetings(self) -> None:
        pieces = self.folder.pieces()
        first = pieces[-1].following if pieces else None  # the first key of all later pieces
        for number in reversed(range(len(pieces))):
            piece = pieces[number]
            if piece.ended and number + 1 < len(pieces) and piece.following != first:
                last = next(
                    (
                        earlier.last
                        for earlier in reversed(pieces[: number + 1])
                        if earlier.last is not None
                    ),
                    self.after,
                )
                self._check_meeting(last, piece.through or b"")
            first = piece.first if piece.first is not None else first

    def _check_meeting(self, last: bytes, end: bytes) -> None:
        for _ in range(MEETING_CHECKS):
            behind_last = next((obj.key for obj in self._page(last) if obj.key > end), None)
            behind_end = next((obj.key for obj in self._page(end)), None)
            if behind_last == behind_end:
                return
        raise ListingUnordered(
            f"the server does not list '{self.context.source}' in byte order of keys"
        )

    def _page(self, after: bytes) -> Sequence[S3Object]:
        return next(self._pages(after, max_pages=1), ())

    def _pages(self, after: bytes, max_pages: int | None = None) -> Iterator[Sequence[S3Object]]:
        return self.context.objects.list_pages(
            after=after,
            max_pages=max_pages,
            in_order=True,
            versions=True,
            by_version=self.by_version,
        )
