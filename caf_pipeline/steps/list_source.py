"""A source listed by several threads into sorted Parquet pieces, which a listing that was
interrupted goes on from.

A range of keys is listed from its begin; where a thread has nothing to do, the range that has been
listed longest is split at a key that `inventory.key_split` chooses. The first page behind that key
is the first of the new range, so that a split where nothing lies behind costs one request. All keys
of a range whose listing ended are in its pieces, each of them a durable file that says which keys
it covers; what no piece covers is listed by the next listing.

A range's listing ends at the first key behind the range, which is right where a server lists keys
in the order of their bytes. That is found out, not believed: each page must be in order, and where
two ranges meet, the first key that the listing of the one has behind its end must be the first key
of the other. In whatever order a server lists, a bucket that does not change is covered where that
holds. Where it does not, ListingUnordered is raised, and the caller lists one page after another.
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
    SNAPSHOT_SCHEMA,
    TAKE_AGAIN,
    opened_parquet,
    snapshot_batch,
)
from caf_pipeline.run_context import RunContext
from caf_pipeline.source.protocol import LastPage
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.folder_lock import alone_in
from caf_pipeline.system.parquet import ROWS_PER_GROUP, WholeParquet, stated, translate_errors

MAX_RESUMED_AGE: Final = timedelta(days=1)
"""Since its first request: what was written later may be missing, and the next listing would have
it no sooner.
"""

PAGES_BEFORE_A_SPLIT: Final = 2
"""A range of one page is not worth a request; a second page tells that there is more.

One more for each split in vain.
"""

SAMPLED: Final = 10
"""Of so many keys one tells which characters there are: of a page a hundred."""

PIECE_OBJECTS: Final = ROWS_PER_GROUP
"""About how many objects a piece holds: 66 requests, which is what a crash loses of each range.

A listing of fewer objects is not resumed: listing it again takes as long, and gives a newer
listing.
"""

MEETING_CHECKS: Final = 3
"""Looks at where two ranges meet before it counts as disorder: a bucket may change between the two
requests of a look.
"""

TOLD_SECONDS: Final = 60.0
"""Between two tellings of how many objects were listed, as those of `caf run` are."""

FOLDER: Final = ".listing-"
_RECORD: Final = "listing.json"
_COVERS: Final = "caf.covers"


@dataclass(frozen=True, slots=True)
class ListingTerms:
    """What is listed: pieces of other terms are of no use.

    Attributes:
        address: bucket, prefix and endpoint.
        after: keys greater than this, percent-encoded.
        until: keys up to and including this, likewise; None for all.
        all_versions: whether older versions and delete markers are kept, or only counted.
    """

    address: str
    after: str
    until: str | None
    all_versions: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """What a listing was begun with, which all of its parts have in common.

    Attributes: listed_at: when its first request was sent, by this machine's clock. taken_at: the
        same by S3's. by_version: whether the bucket keeps versions, as it said then. Asked again,
        it may say something else, as once it may be
            asked; what one listing has with version ids and without them would be archived twice.
    """

    listed_at: datetime
    taken_at: datetime
    by_version: bool


@dataclass(slots=True, eq=False)
class _Range:
    """Keys greater than `after`, up to and including `until` (None: all), and how far their listing
    is.

    Attributes: last: the last key that was listed; `after` before there is one. first: the first
        one. following: the first key behind the range that its listing has; None where that ended
        before, or did not come so far. ended: whether the listing reached the range's end, so that
        `following` tells. split_from: the range that this one was split from, until its first page
        tells whether anything is in it.
    """

    after: bytes
    until: bytes | None
    last: bytes = b""
    first: bytes | None = None
    following: bytes | None = None
    ended: bool = False
    pages: int = 0
    splits_in_vain: int = 0
    split_from: "_Range | None" = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A file with all keys that are greater than `after`, up to and including `through`; see
    `_Range` for the others.

    It may have some versions of a key behind `through`, which do not count. `last` is the last key
    that does.
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
    """Give the folder of a listing of these terms that was interrupted, or a new one; no other
    process uses it meanwhile.

    Folders of listings that are too old, or older than the `newest` whole inventory, are removed.
    Where the context ends by an error, the folder stays if it is worth going on with.
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
            # Until it is locked, another process takes a new folder for one that was left, and
            # removes it.
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
    """Keep other processes out of a listing's folder until the stack is closed; False where one is
    in it, or has removed it.
    """
    try:
        return stack.enter_context(alone_in(path)) and path.exists()
    except FileNotFoundError:
        return False


def read_record(path: Path, newest: datetime | None) -> tuple[ListingTerms, Begun] | None:
    """Return what a listing's folder holds and when that was begun; None where no listing would go
    on with it.
    """
    try:
        said = json.loads((path / _RECORD).read_text(encoding="utf-8"))
        listed_at, taken_at = (
            datetime.fromisoformat(said[name]) for name in ("listed_at", "taken_at")
        )
        begun = Begun(listed_at, taken_at, said["by_version"])
        terms = ListingTerms(**said["terms"])
        listed = sum(_described(piece)["rows"] for piece in path.glob("*.parquet"))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # killed before it was written, of another version, or damaged
        return None
    # One that began in a time to come was begun while this machine's clock was wrong.
    too_old = abs(datetime.now(UTC) - begun.listed_at) > MAX_RESUMED_AGE or (
        newest is not None and newest > begun.listed_at
    )
    return None if too_old or listed < PIECE_OBJECTS else (terms, begun)


def _described(piece: Path) -> dict[str, Any]:
    """Return what a piece says that it covers; raises KeyError or ValueError where that is not as
    it was written.
    """
    described: dict[str, Any] = json.loads(stated(pq.read_metadata(piece), _COVERS))
    return described


class PieceFolder:
    """The pieces of one listing. Safe for several threads that write pieces."""

    def __init__(self, path: Path, begun: Begun | None, terms: ListingTerms | None = None) -> None:
        self.path = path
        self.begun = begun
        self._terms = terms
        # Some numbers are missing: of pieces that were begun when the listing was interrupted.
        self._numbers = itertools.count(
            1 + max((int(piece.stem) for piece in path.glob("*.parquet")), default=0)
        )

    def begin(self, begun: Begun) -> Begun:
        """Record what a new listing is begun with, and return it."""
        assert self._terms is not None
        self.begun = begun
        times = {"listed_at": begun.listed_at.isoformat(), "taken_at": begun.taken_at.isoformat()}
        with WholeFile(self.path / _RECORD) as whole:
            whole.file.write(
                json.dumps(
                    {"terms": asdict(self._terms), **times, "by_version": begun.by_version}
                ).encode()
            )
        return begun

    def pieces(self) -> list[_Piece]:
        """Return the pieces that are there, in the order of their keys."""
        found = []
        for path in self.path.glob("*.parquet"):
            said = _described(path)
            rows, ended, left_out = (
                said.pop("rows"),
                said.pop("ended"),
                VersionCounts(**said.pop("left_out")),
            )
            covers = {
                name: None if text is None else unquote_to_bytes(text)
                for name, text in said.items()
            }
            after = covers.pop("after") or b""
            found.append(_Piece(path, rows, after, **covers, ended=ended, left_out=left_out))
        return sorted(found, key=lambda piece: piece.after)

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all pieces in the order of their keys.

        Raises:
            IntegrityError: a piece is damaged, and was removed: the next listing has what it held.
        """
        for piece in self.pieces():
            rows = 0
            try:
                with opened_parquet(piece.path) as file:
                    if file.schema_arrow.remove_metadata() != SNAPSHOT_SCHEMA:
                        raise IntegrityError(
                            f"the columns of {piece.path} are not those of a snapshot",
                            hint=TAKE_AGAIN,
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
                        f"{piece.path} has {rows} rows and declares {piece.rows}", hint=TAKE_AGAIN
                    )
            except IntegrityError:
                piece.path.unlink(missing_ok=True)
                raise

    def left_out(self) -> VersionCounts:
        """Return what was listed and is in no piece."""
        return sum((piece.left_out for piece in self.pieces()), VersionCounts())

    def new_piece(self) -> WholeParquet:
        """Return a new piece, to be written and published."""
        return WholeParquet(self.path / f"{next(self._numbers):06}.parquet", SNAPSHOT_SCHEMA)


class _PieceWriter:
    """Writes what is listed of a range into pieces, each of which has all versions of its keys.

    Whether the last key of a page has further versions, the next page tells.
    """

    def __init__(self, folder: PieceFolder, after: bytes, *, all_versions: bool) -> None:
        self._folder = folder
        self._after = after
        self._all_versions = all_versions
        self._file: WholeParquet | None = None
        self._first: bytes | None = None
        self._last: bytes | None = None
        self._whole: bytes | None = None  # the last key of the piece that has all of its versions
        self._left_out = VersionCounts()  # of the keys up to that one
        self._pending = VersionCounts()  # of the last key

    def add(self, page: Sequence[S3Object]) -> None:
        begin = bisect_left(
            page, page[-1].key, key=lambda obj: obj.key
        )  # of the last key, which may go on
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
        """Make a piece of the keys that are whole; nothing where it would have no objects."""
        if self._file is not None and self._whole is not None:
            self._publish(self._whole, self._whole, None, ended=False)

    def end(self, through: bytes | None, following: bytes | None) -> None:
        """Make what was written a piece, without any objects, too: the listing of the range reached
        its end.
        """
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
        said: dict[str, Any] = {
            name: key if key is None else quote_from_bytes(key) for name, key in covers.items()
        }
        said |= {"rows": file.row_count, "ended": ended, "left_out": asdict(self._left_out)}
        file.close({_COVERS: json.dumps(said)})
        file.publish()
        self._after = through or b""
        self._file, self._first, self._last, self._whole, self._left_out = (
            None,
            None,
            None,
            None,
            VersionCounts(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.abort()


def drop_old_versions(
    listed: Sequence[S3Object], *, all_versions: bool
) -> tuple[Sequence[S3Object], VersionCounts]:
    """Return what of a listing is for the snapshot, and the counts of the rest."""
    if all_versions:
        return listed, VersionCounts()
    return [obj for obj in listed if obj.is_latest and not obj.is_delete_marker], VersionCounts.of(
        listed
    )


@dataclass
class ParallelListing:
    """One listing of a source by several threads.

    Attributes:
        by_version: as in `Begun`.
        after, until: as in `ListingTerms`, as bytes.
        threads: ranges listed at once, at most.
        listed: objects so far, those of an earlier process included.
    """

    context: RunContext
    folder: PieceFolder
    by_version: bool
    after: bytes
    until: bytes | None
    threads: int
    listed: int = 0
    _waiting: list[_Range] = field(default_factory=list)
    _under_way: list[_Range] = field(default_factory=list)
    _started: list[threading.Thread] = field(default_factory=list)
    _alphabet: set[str] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _failure: BaseException | None = None

    def run(self) -> None:
        """List what no piece covers, and return once the pieces hold everything.

        Raises: What `ObjectSource.list_pages` raises with `in_order`; what is listed until then
            stays. StagingError: no room.
        """
        self._find_gaps()
        try:
            with self._changed:
                self._start()
                while self._failure is None and (self._waiting or self._under_way):
                    with self.context.waits.waiting(
                        f"the listing of '{self.context.source}', which has {self.listed:,} "
                        "objects so far",
                        ends_by="its last page ends it",
                        grace=TOLD_SECONDS
                        if len(self._started) < 2 and not self.listed
                        else TOLD_SECONDS / 2,
                    ):
                        self._changed.wait_for(self._is_over, TOLD_SECONDS)
        except (
            BaseException
        ) as error:  # an interrupt: the threads end after their page, and nothing waits for that
            self._fail(error)
            raise
        for thread in self._started:
            thread.join()
        if self._failure is not None:
            raise self._failure
        self._require_meetings()

    def _is_over(self) -> bool:
        return self._failure is not None or not (self._waiting or self._under_way)

    def _find_gaps(self) -> None:
        at: bytes | None = self.after
        for piece in self.folder.pieces():
            self.listed += piece.rows
            if at is not None and piece.after > at:
                self._waiting.append(_Range(at, piece.after, last=at))
            at = piece.through
        if at is not None and (self.until is None or at < self.until):
            self._waiting.append(_Range(at, self.until, last=at))

    def _start(self) -> None:
        """Start a thread where there is work for one more; the lock is held."""
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
            while (one := self._next()) is not None:
                with translate_errors(self.folder.path):
                    self._list(one)
                with self._changed:
                    self._under_way.remove(one)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._fail(error)

    def _next(self) -> _Range | None:
        """Return a range to list, of those that wait or split off; None where there is none any
        more.
        """
        with self._changed:
            while self._failure is None:
                if self._waiting:
                    one = self._waiting.pop()
                elif not self._under_way:
                    return None
                elif (split := self._split()) is not None:
                    one = split
                else:
                    self._changed.wait()
                    continue
                self._under_way.append(one)
                self._start()
                return one
        return None

    def _splittable(self) -> list[_Range]:
        return [
            one
            for one in self._under_way
            if one.pages >= PAGES_BEFORE_A_SPLIT + one.splits_in_vain and not one.ended
        ]

    def _split(self) -> _Range | None:
        for one in sorted(self._splittable(), key=lambda each: -each.pages):
            one.pages = 0
            at = split_key(
                one.first or one.last,
                one.last,
                one.until,
                alphabet=self._alphabet,
                prefix=self.context.source_settings.prefix,
                jump=one.splits_in_vain % 2 == 1,
            )
            if at is not None:
                behind = _Range(at, one.until, last=at, split_from=one)
                one.until = at
                return behind
        return None

    def _list(self, one: _Range) -> None:
        with _PieceWriter(self.folder, one.after, all_versions=self.context.all_versions) as writer:
            for page in self._pages(one.after):
                objects = self._take(one, page)
                if objects:
                    writer.add(objects)
                if one.ended or self._failure is not None:
                    break
            else:
                self._end(one, None)
            if self._failure is not None and not isinstance(self._failure, Exception):
                return  # an interrupt: whoever comes next may be in the folder already
            if one.ended:
                writer.end(one.until, one.following)
            else:
                writer.close()

    def _take(self, one: _Range, page: Sequence[S3Object]) -> Sequence[S3Object]:
        """Return what of a page is in the range, which may end earlier than it did when the page
        was asked for.
        """
        with self._changed:
            within = (
                len(page)
                if one.until is None
                else bisect_right(page, one.until, key=lambda obj: obj.key)
            )
            objects = page[:within]
            if objects:
                if one.split_from is not None:
                    one.split_from.splits_in_vain = 0
                    one.split_from = None
                one.first = one.first or objects[0].key
                one.last = objects[-1].key
                one.pages += 1
                self.listed += len(
                    drop_old_versions(objects, all_versions=self.context.all_versions)[0]
                )
                self._alphabet.update(*(text_of(obj.key) for obj in objects[::SAMPLED]))
            if within < len(page):
                self._end(one, page[within].key)
            elif isinstance(
                page, LastPage
            ):  # known now: a thread that waits would split off what is empty
                self._end(one, None)
            self._changed.notify_all()
            self._start()
            return objects

    def _end(self, one: _Range, following: bytes | None) -> None:
        with self._changed:
            one.following, one.ended = following, True
            if one.split_from is not None:
                one.split_from.splits_in_vain += 1

    # --- order
    # --------------------------------------------------------------------------------

    def _require_meetings(self) -> None:
        """Look at each place where the listings of two ranges meet, and raise ListingUnordered
        where they contradict each other.

        A range is listed past its end by one key. That key must be the first one of the next range,
        or of the one after it where that is empty.
        """
        pieces = self.folder.pieces()
        first = (
            pieces[-1].following if pieces else None
        )  # of all pieces behind; the last one is not compared
        for number in reversed(range(len(pieces))):
            piece = pieces[number]
            if piece.ended and number + 1 < len(pieces) and piece.following != first:
                last = next(
                    (one.last for one in reversed(pieces[: number + 1]) if one.last is not None),
                    self.after,
                )
                self._look_at_meeting(last, piece.through or b"")
            first = piece.first if piece.first is not None else first

    def _look_at_meeting(self, last: bytes, end: bytes) -> None:
        """Ask whether the same key follows the last key of a range and its end; an object came or
        went there meanwhile.
        """
        for _ in range(MEETING_CHECKS):
            behind_last = next((obj.key for obj in self._page(last) if obj.key > end), None)
            behind_end = next((obj.key for obj in self._page(end)), None)
            if behind_last == behind_end:
                return
        raise ListingUnordered(
            f"the listing of '{self.context.source}' in parts leaves something out"
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
