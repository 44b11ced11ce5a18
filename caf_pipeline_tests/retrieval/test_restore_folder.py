"""Objects restored to a folder: numbers of requests, file names, and failures."""

import errno
import os
import threading
import unicodedata
from contextlib import closing
from functools import partial
from itertools import islice
from random import Random
from types import SimpleNamespace

import pytest

from caf_pipeline.errors import StagingError, StoreUnreachable
from caf_pipeline.retrieval import restore_folder
from caf_pipeline.retrieval.bulk import SMALL_BYTES
from caf_pipeline.retrieval.check import UNREAD_IN_A_ROW
from caf_pipeline.retrieval.file_names import key_of
from caf_pipeline.retrieval.listing import list_objects
from caf_pipeline.retrieval.restore import RestoreOutcome, RestoreSums, restore_objects
from caf_pipeline.retrieval.restore_folder import RestoreFolder
from caf_pipeline.system import files_below
from caf_pipeline.system.files_below import FilesBelow
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support.breaking_folders import BreakingFolders
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything

SMALL = {f"dir/{number:03}": os.urandom(500 + number) for number in range(200)}
BODIES = SMALL | {"dir/100-large": os.urandom(SMALL_BYTES + 1), "dir/empty": b""}


class BadSpot(BreakingFolders):
    """Providers that cannot read the byte at `spot`, and wait at `meeting` before each read."""

    spot = -1
    meeting = threading.Barrier(1)

    def read(self, posting, start_byte, end_byte, *, provider=None):
        self.meeting.wait()
        for piece in super().read(posting, start_byte, end_byte, provider=provider):
            if start_byte <= self.spot < start_byte + len(piece):
                yield piece[: self.spot - start_byte]
                raise StoreUnreachable(f"{provider} does not answer")
            start_byte += len(piece)
            yield piece


@pytest.fixture
def bodies():
    return BODIES


@pytest.fixture
def context(tmp_path, ledger, bodies):
    context = a_run_context(
        tmp_path,
        MemorySource(dict(bodies)),
        ledger,
        target="8MiB",
        store=BadSpot(tmp_path / "store"),
    )
    archive_everything(context)
    context.store.asked.clear()
    return context


@pytest.fixture
def restore(context, tmp_path):
    """Return a function that restores to a folder and returns the results, and files by path."""

    def run(*, force=False, most=None):
        with FilesBelow(tmp_path / "out", force=force) as files:
            files.own()
            target = RestoreFolder(files, context.store, force=force, dry_run=False)
            with closing(
                restore_objects(list_objects(context.ledger.lookup, "src"), target)
            ) as outcomes:
                done = list(islice(outcomes, most))
        return done, files_in(tmp_path / "out")

    return run


def files_in(folder):
    """Return the files below a folder by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("batch", [{}, {"BATCH_BYTES": 10_000}, {"BATCH_OBJECTS": 11}])
def test_neighbours_share_requests_and_equal_files_need_none(context, restore, monkeypatch, batch):
    for name, value in batch.items():
        monkeypatch.setattr(restore_folder, name, value)
    done, files = restore()
    assert files == BODIES
    assert [result.location.row.key for result in done] == sorted(BODIES)
    assert len(context.store.asked) < (len(BODIES) / 8 if batch else 5)
    context.store.asked.clear()
    done, _ = restore()
    assert {result.outcome for result in done} == {RestoreOutcome.EQUAL}
    assert not context.store.asked


def test_unreadable_object_does_not_stop_its_neighbours(context, restore):
    bad, *_ = list_objects(context.ledger.lookup, "src", "dir/020")
    wrong, *_ = list_objects(context.ledger.lookup, "src", "dir/030")
    context.store.spot = bad.row.start_byte + 3
    for provider in context.store.folders:
        corrupt(context.store.file(provider, wrong.posting), at=wrong.row.start_byte)
    done, files = restore()
    assert files == {key: body for key, body in BODIES.items() if key not in {"dir/020", "dir/030"}}
    assert {result.location.row.key: result.error.permanent for result in done if result.error} == {
        "dir/020": False,
        "dir/030": True,
    }
    assert sum(result.outcome is RestoreOutcome.FAILED for result in done) == 2


def test_providers_that_are_away_are_not_asked_for_every_object(context, restore):
    context.store.away = set(context.store.folders)
    with pytest.raises(StoreUnreachable, match=rf"^{UNREAD_IN_A_ROW} objects"):
        restore()
    assert len(context.store.asked) < 3 * len(BODIES) / 2


@pytest.mark.parametrize("bodies", [{"a": os.urandom(5 << 20), "b": os.urandom(5 << 20)}])
@pytest.mark.parametrize("in_memory", [8 << 20, 1 << 20], ids=["in memory", "in files"])
def test_objects_that_fill_a_request_are_read_side_by_side(
    context, restore, bodies, monkeypatch, in_memory
):
    monkeypatch.setattr(restore_folder, "IN_MEMORY_BYTES", in_memory)
    context.store.meeting = threading.Barrier(len(bodies), timeout=PATIENCE_SECONDS)
    done, files = restore()
    assert (files, [result.error for result in done]) == (bodies, [None, None])


@pytest.mark.parametrize("bodies", [BODIES | {"a": bytes(700), "a/b": b"1", "a/c": bytes(800)}])
def test_large_objects_are_named_in_listing_order(context, restore, bodies, monkeypatch):
    monkeypatch.setattr(restore_folder, "IN_MEMORY_BYTES", 600)
    wrong, *_ = list_objects(context.ledger.lookup, "src", "dir/130")
    for provider in context.store.folders:
        corrupt(context.store.file(provider, wrong.posting), at=wrong.row.start_byte)
    done, files = restore(most=150)  # interrupted while objects are under way
    places = {result.place: bodies[result.location.row.key] for result in done if not result.error}
    assert (len(done), files) == (150, places)
    done, files = restore()
    places = {result.place: bodies[result.location.row.key] for result in done if not result.error}
    assert files == places
    assert {"a", ".caf~a/b", ".caf~a/c"} <= places.keys()
    assert [result.location.row.key for result in done if result.error] == ["dir/130"]


LONG = "a/" + "n" * 300
NESTED = [
    "a",
    "a/b",
    "a/c",
    "a/c/d",
    "a/c/d/e",
    "a/c/d/e/",
    "a/c/d/e//f",
    "a/c/d/.caf~e/g",
    "..",
    "../b",
    LONG,
    f"{LONG}/o",
]


@pytest.mark.parametrize("bodies", [{key: key.encode() for key in NESTED}])
def test_nested_keys_all_get_files_in_any_order(context, tmp_path, bodies):
    listed = list(list_objects(context.ledger.lookup, "src"))
    for number in range(6):
        folder = tmp_path / f"out{number}"
        for _ in range(2):
            Random(number).shuffle(listed)
            with FilesBelow(folder, force=False) as files:
                done = list(
                    RestoreFolder(files, context.store, force=False, dry_run=False).restore(listed)
                )
            assert [result.error for result in done if result.error] == []
            assert {
                key_of(path.split("/")): body for path, body in files_in(folder).items()
            } == bodies
        assert {result.outcome for result in done} == {RestoreOutcome.EQUAL}


@pytest.mark.parametrize("bodies", [{key: key.encode() for key in NESTED}])
@pytest.mark.parametrize(
    "in_the_way", [["a"], ["a", ".caf~a"], [".caf~..", "a/c", "a/.caf+" + "n" * 200]], ids=len
)
@pytest.mark.parametrize("make", [os.mkfifo, partial(os.symlink, "gone/too")], ids=["pipe", "link"])
def test_keys_get_files_despite_taken_names(context, tmp_path, bodies, in_the_way, make):
    listed = list(list_objects(context.ledger.lookup, "src"))
    for number in range(3):
        for name in in_the_way:
            path = tmp_path / f"out{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path)
        outcomes = []
        for dry_run in (True, False, True, False):
            Random(number).shuffle(listed)
            with FilesBelow(tmp_path / f"out{number}", force=False) as files:
                done = list(
                    RestoreFolder(files, context.store, force=False, dry_run=dry_run).restore(
                        listed
                    )
                )
            assert [result.error for result in done if result.error] == []
            outcomes.append({result.outcome for result in done})
        assert outcomes == [{RestoreOutcome.RESTORED}] * 2 + [{RestoreOutcome.EQUAL}] * 2
        assert {
            key_of(path.split("/")): body
            for path, body in files_in(tmp_path / f"out{number}").items()
        } == bodies


@pytest.mark.parametrize("bodies", [{"a": b"1", "b": b"2"}])
def test_refused_objects_are_not_hinted_to_resume(context, restore, tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("a", ".caf~a", ".caf+"):
        (tmp_path / "out" / name).symlink_to("gone")
    done, files = restore()
    assert files == {"b": b"2"}
    sums = RestoreSums()
    for one in done:
        sums.add(one)
    assert "resumes" not in sums.failure(None).hint
    context.store.away = set(context.store.folders)
    (tmp_path / "out" / "b").unlink()
    for one in restore()[0]:
        sums.add(one)
    assert "resumes" in sums.failure(None).hint


@pytest.mark.parametrize("bodies", [{"a": bytes(700), "b": bytes(700), "c/d": bytes(700)}])
@pytest.mark.parametrize("in_memory", [8 << 20, 600], ids=["in memory", "in files"])
def test_a_private_file_that_is_replaced_stays_private(
    restore, bodies, monkeypatch, tmp_path, in_memory
):
    monkeypatch.setattr(restore_folder, "IN_MEMORY_BYTES", in_memory)
    (tmp_path / "out" / "c").mkdir(parents=True)
    (tmp_path / "new").touch()
    for name in ("a", "c/d"):
        (tmp_path / "out" / name).touch(0o600)
    done, files = restore(force=True)
    assert (files, [result.error for result in done]) == (bodies, [None] * 3)
    modes = {name: (tmp_path / "out" / name).stat().st_mode & 0o777 for name in bodies}
    assert modes == {"a": 0o600, "b": (tmp_path / "new").stat().st_mode & 0o777, "c/d": 0o600}


@pytest.mark.parametrize("bodies", [{f"{number}": os.urandom(400_000) for number in range(4)}])
def test_full_disk_ends_a_restore_without_partial_files(context, small_disk, bodies, monkeypatch):
    monkeypatch.setattr(restore_folder, "IN_MEMORY_BYTES", 1000)
    with (
        FilesBelow(small_disk, force=False) as files,
        pytest.raises(StagingError, match="No space left"),
    ):
        list(
            RestoreFolder(files, context.store, force=False, dry_run=False).restore(
                list_objects(context.ledger.lookup, "src")
            )
        )
    assert files_in(small_disk).items() <= bodies.items()


class OneNameForSome:
    """The module `os` on a file system that treats some names as equal."""

    def __init__(self, fold):
        self.fold = fold

    def __getattr__(self, name):
        given = getattr(os, name)
        if name not in {"access", "link", "mkdir", "open", "replace", "stat", "unlink"}:
            return given
        return lambda *names, **options: given(*map(self.folded, names), **options)

    def folded(self, name):
        if isinstance(name, bytes):
            return self.fold(name.decode()).encode()
        return self.fold(name) if isinstance(name, str) else name


@pytest.mark.parametrize(
    ("fold", "bodies"),
    [
        (str.lower, {"dir/A": b"1", "dir/a": b"2"}),
        (partial(unicodedata.normalize, "NFD"), {"dir/e\u0301": b"1", "dir/\u00e9": b"2"}),
    ],
    ids=["case", "normal form"],
)
def test_second_key_never_replaces_the_first_of_a_name(restore, bodies, monkeypatch, fold):
    monkeypatch.setattr(files_below, "os", OneNameForSome(fold))
    for force in (False, True, True):
        done, files = restore(force=force)
        assert list(files.values()) == [b"1"]
        assert done[1].outcome is not RestoreOutcome.RESTORED
    assert [result.outcome for result in done] == [RestoreOutcome.EQUAL, RestoreOutcome.FAILED]


@pytest.mark.parametrize("bodies", [{"dir/A": b"same", "dir/a": b"same", "dir/b": b"same"}])
def test_equal_keys_do_not_share_one_file(restore, monkeypatch, bodies, tmp_path):
    monkeypatch.setattr(files_below, "os", OneNameForSome(str.lower))
    restore()
    done, _ = restore()
    assert [result.outcome for result in done] == [
        RestoreOutcome.EQUAL,
        RestoreOutcome.FAILED,
        RestoreOutcome.EQUAL,
    ]
    # A tool that saves room has linked equal files.
    (tmp_path / "out" / "dir" / "b").unlink()
    os.link(tmp_path / "out" / "dir" / "a", tmp_path / "out" / "dir" / "b")
    done, _ = restore()
    assert done[2].outcome is RestoreOutcome.EQUAL


@pytest.mark.parametrize("bodies", [{"a": b"1", "b": b"2"}])
def test_unreadable_file_is_left_and_not_duplicated(restore, monkeypatch, bodies, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_bytes(b"mine")

    def opened(name, *given, **options):
        if name == b"a":
            raise PermissionError(errno.EACCES, "Permission denied")
        return os.open(name, *given, **options)

    monkeypatch.setattr(files_below, "os", SimpleNamespace(**vars(os) | {"open": opened}))
    done, files = restore(force=True)
    assert [result.outcome for result in done] == [RestoreOutcome.FAILED, RestoreOutcome.RESTORED]
    assert files == {"a": b"mine", "b": b"2"}
