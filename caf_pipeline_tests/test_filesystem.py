"""`caf://`: fsspec's own tests of reading, and the libraries that people read with."""

import contextlib
import errno
import gc
import io
import os
import pickle
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial

import duckdb
import fsspec
import numpy as np
import pandas as pd
import polars as pl
import psycopg
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from fsspec.callbacks import Callback
from fsspec.spec import AbstractBufferedFile
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests

from caf_pipeline import filesystem
from caf_pipeline.errors import IntegrityError, LedgerError, SettingsError, UsageError
from caf_pipeline.filesystem import CafFileSystem
from caf_pipeline.retrieval import bulk
from caf_pipeline.retrieval.archive import Archive
from caf_pipeline_tests.support.breaking_folders import BreakingFolders
from caf_pipeline_tests.support.command_line import KEYS, CommandLine, archive_source, source_text
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything
from caf_pipeline_tests.support.s3_server import make_bucket

pytestmark = pytest.mark.thorough

TABLE = pa.table({"number": range(50_000), "text": [f"row {number}" for number in range(50_000)]})


class FilledFileSystem(CafFileSystem):
    """What a test writes is in a source, which is archived before anything is read."""

    cachable = False

    def __init__(self, context):
        super().__init__()
        self.context = context
        self.written = 0
        self.reading = Archive(context.ledger.lookup, context.store)

    @property
    def archive(self):
        if len(self.context.objects.bodies) > self.written:
            self.written = len(self.context.objects.bodies)
            archive_everything(self.context)
        return self.reading

    def pipe_file(self, path, value, **_):
        self.context.objects.bodies[path.removeprefix("src/")] = value

    pipe = pipe_file

    def touch(self, path, **_):
        self.pipe_file(path, b"")

    def mkdir(self, path, **_):
        """Make nothing: keys make directories."""

    makedirs = rm = mkdir


@pytest.fixture
def fs(tmp_path, ledger):
    store = BreakingFolders(tmp_path / "store")
    return FilledFileSystem(a_run_context(tmp_path, MemorySource({}), ledger, store=store))


class TestReading(AbstractFixtures, AbstractGetTests):
    @pytest.fixture
    def fs(self, tmp_path, ledger):
        return FilledFileSystem(a_run_context(tmp_path, MemorySource({}), ledger))

    @pytest.fixture
    def fs_path(self):
        return "src/top"

    @pytest.fixture
    def fs_join(self):
        return lambda *names: "/".join(names)

    @pytest.fixture
    def supports_empty_directories(self):
        return False


@pytest.fixture
def filled(fs):
    for key, body in {
        "a": b"file",
        "a/b": b"below",
        "a/c/d": b"deep",
        "a//odd": b"odd",
        "dir/": b"",
        "é ü": b"utf",
    }.items():
        fs.pipe_file(key, body)
    return fs


def test_directories_are_what_keys_have_in_common(filled):
    assert filled.ls("caf://", detail=False) == ["src"]
    assert filled.ls("src", detail=False) == ["src/a", "src/a", "src/dir", "src/é ü"]
    assert filled.ls("src/a", detail=False) == ["src/a/b", "src/a/c"]
    assert filled.ls("src/a/b", detail=False) == ["src/a/b"]
    assert filled.ls("src/dir") == []
    assert filled.find("caf://src") == ["src/a", "src/a//odd", "src/a/b", "src/a/c/d", "src/é ü"]
    assert filled.find("src/a", withdirs=True) == [
        "src/a",
        "src/a//odd",
        "src/a/b",
        "src/a/c",
        "src/a/c/d",
    ]
    assert filled.find("src/a", maxdepth=1) == ["src/a/b"]
    assert filled.glob("caf://src/a/*") == ["src/a/b", "src/a/c"]
    assert filled.glob("src/**/d") == ["src/a/c/d"]
    assert filled.glob("*") == ["src"]
    assert filled.find("nothing") == filled.find("src/nothing") == filled.glob("src/x*") == []
    for path in ("nothing", "src/nothing", "src/nothing/"):
        with pytest.raises(FileNotFoundError):
            filled.ls(path)


def test_walk_lists_once_what_levels_list_one_by_one(filled, monkeypatch):
    for key in ("a/c/e/f", "b/c//g", "/odd"):
        filled.pipe_file(key, b"more")
    archive, listed = filled.archive, []

    def ls(*arguments, **options):
        listed.append(arguments)
        return Archive.ls(archive, *arguments, **options)

    def walked(path, keys, **options):
        monkeypatch.setattr(filesystem, "WALKED_KEYS", keys)
        listed.clear()
        return list(filled.walk(path, **options))

    monkeypatch.setattr(archive, "ls", ls)
    for path in ("src", "caf://src/a/", "src/a/b", "src/dir", "src/none", "none"):
        for options in ({}, {"topdown": False}, {"detail": True}):
            assert walked(path, 100, **options) == walked(path, 0, **options)
    assert walked("", 100) == walked("", 4)
    assert len(walked("src", 100)) == 7
    assert len(listed) == 1
    for _, directories, files in filled.walk("src"):
        assert "f" not in files
        directories[:] = set(directories) - {"c"}


@pytest.mark.parametrize("front", ["/", "caf:///"])
def test_leading_slash_names_the_same_path(filled, tmp_path, front):
    assert filled.cat_file(f"{front}src/a/b") == b"below"
    assert filled.find(f"{front}src/a/c") == ["src/a/c/d"]
    assert filled.glob(f"{front}src/a/*") == ["src/a/b", "src/a/c"]
    assert (
        filled.isdir(f"{front}src/a/b"),
        filled.exists(f"{front}src/x"),
        filled.exists(f"{front}none/a"),
    ) == (False,) * 3
    assert (filled.find(f"{front}none/a"), filled.du(f"{front}none")) == ([], 0)
    with pytest.raises(FileNotFoundError):
        filled.get(f"{front}none/", str(tmp_path / "out"), recursive=True)
    with pytest.raises(FileNotFoundError):
        filled.ls(f"{front}none")


def test_find_lists_all_sources(filled):
    assert filled.find("") == filled.find("src")
    assert filled.find("caf://", withdirs=True, detail=True) == filled.find(
        "src", withdirs=True, detail=True
    )
    assert list(filled.find("", withdirs=True)) == sorted(
        {"src", *filled.find("src", withdirs=True)}
    )


def test_info_has_the_facts_of_a_file(filled):
    info = filled.info("caf://src/a/b")
    assert (info["name"], info["size"], info["type"], info["status"]) == (
        "src/a/b",
        5,
        "file",
        "current",
    )
    assert info in filled.ls("src/a")
    assert filled.find("src/a", detail=True)["src/a/b"] == info
    assert filled.modified("src/a/b") == info["LastModified"]
    assert (
        filled.isfile("src/a"),
        filled.isdir("src/a/c"),
        filled.isdir(""),
        filled.isdir("src"),
    ) == (True,) * 4
    assert [filled.exists(path) for path in ("src/a/b", "src/a/c", "src/a/x", "else", "src")] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_bytes_and_slices_are_read(filled):
    assert filled.cat_file("src/a/b") == b"below"
    assert [
        filled.cat_file("src/a/b", *edges) for edges in ((1, 3), (-2, None), (None, -1), (9, None))
    ] == [b"el", b"ow", b"belo", b""]
    assert filled.cat(["src/a", "src/a/b"]) == {"src/a": b"file", "src/a/b": b"below"}
    assert filled.cat("src/a/*", on_error="omit") == {"src/a/b": b"below"}
    with filled.open("src/é ü", "r") as file:
        assert file.read() == "utf"
    version = filled.info("src/a/b")["object_version"]
    with filled.open("src/a/b", object_version=version) as file:
        assert file.read() == b"below"
    assert filled.read_text("src/a/b", object_version=version) == "below"
    for asked in ({"object_version": "v9"}, {"as_of": datetime(2000, 1, 1, tzinfo=UTC)}):
        with pytest.raises(FileNotFoundError, match="LastModified"):
            filled.open("src/a/b", **asked)
    with pytest.raises(FileNotFoundError, match="'x'"):
        filled.open("src/x")


@pytest.mark.parametrize("beside", [{}, {"dir": b"file"}, {"dir/below": b"below"}])
def test_get_of_a_key_ending_in_a_slash_fails(filled, tmp_path, beside):
    for key, body in beside.items():
        filled.pipe_file(key, body)
    out = tmp_path / "out"
    for get, *paths in [
        (filled.get, "src/dir/", str(out)),
        (filled.get, ["src/a", "src/dir/"], [str(out / "a"), str(out / "dir")]),
        (filled.get_file, "caf://src/dir/", str(out)),
    ]:
        with pytest.raises(FileNotFoundError, match="caf get"):
            get(*paths)
    assert not out.exists()


def test_path_ending_in_a_slash_does_not_read_another_key(filled):
    filled.pipe_file("dir", b"without")  # 'dir/' is archived, too
    asked = "caf://src/dir/"
    calls = [
        partial(call, asked)
        for call in (filled.open, filled.cat_file, filled.cat, filled.modified, filled.head)
    ]
    calls += [
        partial(filled.open, asked, "r"),
        partial(filled.cat, ["src/a", asked]),
    ]
    calls += [
        partial(filled.cat_ranges, [asked], 0, 4, on_error="raise"),
        partial(filled.info, "src/a/b/"),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError, match="caf get"):
            call()
    body, error = filled.cat_ranges(["src/dir", "src/dir/"], 0, 4)
    assert (body, type(error)) == (b"with", FileNotFoundError)
    assert filled.info(asked)["type"] == filled.info("src/a/")["type"] == "directory"
    assert not filled.exists("src/a/b/")
    assert (filled.info("src/dir")["type"], filled.cat("src/dir")) == ("file", b"without")


def test_key_with_pattern_characters_matches_itself_first(filled, tmp_path):
    for key, body in {
        "p/a[1].txt": b"itself",
        "p/a1.txt": b"matched",
        "p/b*c?": b"stars",
        "p/bxcy": b"other",
    }.items():
        filled.pipe_file(key, body)
    assert (filled.cat("src/p/a[1].txt"), filled.cat("caf://src/p/b*c?")) == (b"itself", b"stars")
    assert filled.cat(["src/p/b*c?", "src/p/a[12].txt", "src/a"]) == {
        "src/p/b*c?": b"stars",
        "src/p/a1.txt": b"matched",
        "src/a": b"file",
    }
    assert filled.cat("src/p/b*") == {"src/p/b*c?": b"stars", "src/p/bxcy": b"other"}
    filled.get("src/p/a[1].txt", str(tmp_path / "one.txt"))
    filled.get("src/p/a[1].txt", f"{tmp_path}/folder/")
    filled.get("src/p/b*c?", str(tmp_path / "folder"))
    filled.get(["src/p/a[1].txt"], f"{tmp_path}/list/")
    filled.get("src/p/a[1].txt", f"{tmp_path}/r", recursive=True)
    written = {
        str(path.relative_to(tmp_path)): path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert {
        name: body
        for name, body in written.items()
        if name.split("/")[0] in ("one.txt", "folder", "list", "r")
    } == {
        "one.txt": b"itself",
        "folder/a[1].txt": b"itself",
        "folder/b*c?": b"stars",
        "list/a[1].txt": b"itself",
        "r/a[1].txt": b"itself",
    }
    with pytest.raises(FileNotFoundError):
        filled.cat("src/p/a[1].txt/")


def test_directories_may_end_in_a_slash(filled, tmp_path):
    for path in ("src/a/c", "src/a", "src"):
        assert filled.ls(f"{path}/") == filled.ls(path)
        assert filled.find(f"{path}/") == filled.find(path)
        assert list(filled.walk(f"{path}/")) == list(filled.walk(path))
    assert filled.info("src/a/c/") == filled.info("src/a/c")
    assert filled.glob("src/a/c/") == filled.glob("src/a/c") == ["src/a/c"]
    filled.get("src/a/c/", str(tmp_path / "out"))
    filled.get("src/a/c/", str(tmp_path / "out"), recursive=True)
    assert (tmp_path / "out" / "d").read_bytes() == b"deep"


def test_open_file_has_what_files_of_fsspec_have(filled):
    with filled.open("caf://src/a/b") as file:
        assert isinstance(file, AbstractBufferedFile)
        assert (file.mode, file.fs, file.full_name) == ("rb", filled, "caf://src/a/b")
        assert file.details == file.info() == filled.info("src/a/b")
        assert (file.readuntil(b"l"), file.loc, file.read()) == (b"bel", 3, b"ow")
        file.loc = 1
        assert (file.tell(), file.readlines(1), list(file)) == (1, [b"elow"], [])


def test_pickled_file_is_the_same_version_at_the_same_position(filled):
    file = filled.open("src/a/b")
    file.seek(2)
    reopen, arguments = file.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    filled.pipe_file("a/b", b"other bytes")
    filled.pipe_file("a/new", b"so that it is archived")
    assert filled.cat("src/a/b") == b"other bytes"
    again = reopen(*arguments)
    assert (again, hash(again), again.info()) == (file, hash(file), file.info())
    assert again != filled.open("src/a/b")
    assert again.read() == b"low"


def test_version_options_are_refused_outside_of_open(filled):
    for asked in ({"object_version": "v9"}, {"as_of": datetime(2000, 1, 1, tzinfo=UTC)}):
        calls = [
            partial(call, "src/a/b", **asked)
            for call in (filled.cat_file, filled.cat, filled.info, filled.ls, filled.find)
        ]
        calls += [
            partial(fsspec.open, "caf://src/a/b", **asked),
            partial(filled.cat, ["src/a", "src/a/b"], **asked),
        ]
        calls += [
            partial(call, "src/a/b", **asked)
            for call in (filled.exists, filled.lexists, filled.expand_path)
        ]
        for call in calls:
            with pytest.raises(TypeError, match=r"open\(\)"):
                call()
    with pytest.raises(UsageError, match="zone"):
        filled.open("src/a/b", as_of=datetime(2000, 1, 1))  # noqa: DTZ001 - a time that may mean any
    with pytest.raises(TypeError, match="as_of"):
        filled.open("src/a/b", as_of="2000-01-01")


def test_ranges_are_read_by_few_requests(fs):
    bodies = {f"k{number:02}": os.urandom(2000) for number in range(50)}
    for key, body in bodies.items():
        fs.pipe_file(key, body)
    paths = [f"caf://src/{key}" for key in bodies for _ in range(2)] + ["src/none", "other/none"]
    starts, ends = [0, 1000] * 50 + [0, 0], [10, 2000] * 50 + [1, 1]
    assert fs.archive
    fs.context.store.asked.clear()
    *given, missing, unknown = fs.cat_ranges(paths, starts, ends)
    assert given == [
        body[start:end] for body in bodies.values() for start, end in ((0, 10), (1000, 2000))
    ]
    assert (type(missing), type(unknown)) == (FileNotFoundError, FileNotFoundError)
    assert len(fs.context.store.asked) == 1
    edges = np.array([3, 9])  # of an index, as Zarr and Parquet readers have them
    assert (
        fs.cat_ranges(paths[:2], *edges)
        == fs.cat_ranges(paths[:2], edges[[0, 0]], edges[[1, 1]])
        == [bodies["k00"][3:9]] * 2
    )
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, starts, ends, on_error="raise")
    with pytest.raises(ValueError, match="length"):
        fs.cat_ranges(paths, [0], ends)


@pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning"
)  # fsspec leaves the files of blockcache open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("protocol", ["simplecache", "filecache", "blockcache"])
def test_cached_files_have_the_same_bytes(fs, tmp_path, protocol):
    bodies = {"small": os.urandom(5000), "large": os.urandom(9 << 20)}
    for key, body in bodies.items():
        fs.pipe_file(key, body)
    cached = fsspec.filesystem(
        protocol, fs=fs, cache_storage=str(tmp_path / "cache"), skip_instance_cache=True
    )
    for key, body in [*bodies.items(), *bodies.items()]:
        with cached.open(f"src/{key}") as file:
            file.seek(4000)
            assert file.read(100) == body[4000:4100]
        with cached.open(f"src/{key}") as file:
            assert file.read() == body
    with pytest.raises(FileNotFoundError):
        cached.open("src/none")
    del file
    gc.collect()  # here, and not in another test


def test_unwritable_local_file_raises_oserror(filled, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        filled.get_file("src/a", str(tmp_path / "folder"))


def test_write_operations_are_refused(tmp_path):
    fs = fsspec.filesystem("caf", config=tmp_path / "no.toml", skip_instance_cache=True)
    (tmp_path / "x").write_bytes(b"x")
    for write in (
        lambda: fs.open("src/a", "wb"),
        lambda: fs.write_text("src/a", "text"),
        lambda: fs.pipe({"src/a": b"x"}),
        lambda: fs.put(str(tmp_path / "x"), "src/a"),
        lambda: fs.rm("src/a", recursive=True),
        lambda: fs.mkdir("src/a"),
        lambda: fs.makedirs("src/a", exist_ok=True),
        lambda: fs.touch("src/a"),
        lambda: fs.mv("src/a", "src/b"),
        lambda: fs.cp("src/a", "src/b"),
    ):
        with pytest.raises(OSError, match="read-only") as refused:
            write()
        assert refused.value.errno == errno.EROFS


def damage(store, location, provider):
    """Let a provider give a wrong last byte of an object."""
    path = store.file(provider, location.posting)
    body = bytearray(path.read_bytes())
    body[location.row.end_byte - 1] ^= 1
    path.write_bytes(body)


def test_file_is_written_completely_or_not_at_all(filled, tmp_path, monkeypatch):
    assert filled.archive
    location = filled.archive.find("src", "a/b").location
    for provider in filled.context.store.folders:
        damage(filled.context.store, location, provider)
    with pytest.raises(Exception, match="SHA-256"):
        filled.get_file("src/a/b", str(tmp_path / "out" / "b"))
    assert list((tmp_path / "out").iterdir()) == []
    filled.get("src/a/c", str(tmp_path / "out"), recursive=True)
    assert (tmp_path / "out" / "c" / "d").read_bytes() == b"deep"


def test_unreadable_chunk_is_an_oserror_too(filled, tmp_path):
    file, location = filled.open("src/a/b"), filled.archive.find("src", "a/b").location
    (returned,) = filled.cat_ranges(["src/a/b"], 0, 2)
    assert returned == b"be"
    for provider in filled.context.store.folders:
        damage(filled.context.store, location, provider)
    calls = [
        file.read,
        partial(filled.cat, "src/a/b"),
        partial(filled.cat_file, "src/a/b", 0, 2),
        partial(filled.get, "src/a/b", str(tmp_path / "b")),
        partial(filled.cat_ranges, ["src/a/b"], 0, 2, on_error="raise"),
    ]
    for call in calls:
        with pytest.raises(OSError, match="SHA-256") as raised:
            call()
        for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
            assert isinstance(error, IntegrityError)
            assert isinstance(error, OSError)
            assert "caf repair" in error.hint
    (error,) = filled.cat_ranges(["src/a/b"], 0, 2)
    assert isinstance(error, OSError)


def test_callback_receives_progress_despite_a_provider_change(fs, tmp_path):
    fs.pipe_file("large", os.urandom(9 << 20))
    told = []
    callback = Callback(hooks={"told": lambda size, value, **_: told.append((size, value))})
    fs.get_file("src/large", str(tmp_path / "one"), callback=callback)
    assert (told[0], told[-1]) == ((9 << 20, 0), (9 << 20, 9 << 20))
    assert len(told) > 9
    location = fs.archive.find("src", "large").location
    damage(fs.context.store, location, next(iter(fs.context.store.holders(location.posting))))
    again = []
    callback = Callback(hooks={"told": lambda size, value, **_: again.append(value)})
    fs.get_file("src/large", str(tmp_path / "two"), callback=callback)
    assert again.count(0) == 2  # at the begin, and where the other provider begins
    assert again[-1] == 9 << 20
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()


@pytest.mark.parametrize("odd", ["a//odd", "a/x/../odd", "../../outside"])
def test_unsafe_keys_are_not_written_to_paths(fs, tmp_path, odd):
    fs.context.objects.bodies.update({"a/odd": b"1", "b/c": b"2", odd: b"3"})
    (out := tmp_path / "in" / "out").mkdir(parents=True)
    for one, options in [
        ("src", {"recursive": True}),
        ("src/**", {}),
        (["src"], {"recursive": True}),
    ]:
        with pytest.raises(UsageError, match="path") as refused:
            fs.get(one, str(out), **options)
        assert "caf restore" in refused.value.hint
    assert [path for path in (tmp_path / "in").rglob("*") if path.is_file()] == []
    fs.get("src/b", str(out), recursive=True)
    fs.get(f"src/{odd}", str(out / "one"))
    assert {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()} == {
        "c": b"2",
        "one": b"3",
    }


def test_unreachable_database_is_not_a_missing_file(filled, database, postgres_url):
    assert filled.exists("src/a")
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f"DROP DATABASE {database.name} WITH (FORCE)")
        for ask in (filled.exists, filled.isfile, filled.isdir, filled.cat_file):
            with pytest.raises(LedgerError):
                ask("src/a/b")
        admin.execute(f"CREATE DATABASE {database.name}")


# --- the libraries
# ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def caf(tmp_path_factory, s3_server, databases):
    """A folder whose caf.toml has a source with tables."""
    caf = CommandLine(
        tmp_path_factory.mktemp("tables"), KEYS | {"CAF_DATABASE_URL": databases.take().url}
    )
    bucket = make_bucket(s3_server)
    for number in range(2):
        buffer = io.BytesIO()
        pq.write_table(TABLE.slice(number * 25_000, 25_000), buffer, row_group_size=5000)
        bucket.put(f"tables/part-{number}.parquet", buffer.getvalue())
    bucket.put("numbers.csv", TABLE.slice(0, 100).to_pandas().to_csv(index=False).encode())
    caf.settings(source_text(s3_server, bucket.name))
    archive_source(caf)
    return caf


@pytest.fixture
def registered(caf):
    """The file system, as its protocol's name gives it."""
    with caf.surroundings():
        fs = fsspec.filesystem("caf", skip_instance_cache=True)
        yield fs
        assert type(fs) is CafFileSystem


@pytest.mark.parametrize("in_memory", [bulk.IN_MEMORY_BYTES, 1000], ids=["compared", "by ranges"])
@pytest.mark.usefixtures("registered")
def test_pandas_reads_tables(monkeypatch, in_memory):
    monkeypatch.setattr("caf_pipeline.retrieval.object_file.IN_MEMORY_BYTES", in_memory)
    assert pd.read_parquet("caf://src/tables/part-0.parquet").equals(
        TABLE.slice(0, 25_000).to_pandas()
    )
    assert (
        list(pd.read_parquet("caf://src/tables/part-1.parquet", columns=["number"])["number"])[-1]
        == 49_999
    )
    assert len(pd.read_csv("caf://src/numbers.csv")) == 100


@pytest.mark.usefixtures("registered")
def test_working_directory_and_config_select_the_archive(tmp_path, monkeypatch):
    read = partial(pd.read_csv, "caf://src/numbers.csv")
    assert len(read()) == 100
    with contextlib.chdir(tmp_path), pytest.raises(SettingsError, match=r"no caf\.toml"):
        read()
    assert len(read()) == 100
    monkeypatch.setenv("CAF_CONFIG", str(tmp_path / "other.toml"))
    with pytest.raises(SettingsError, match=r"other\.toml"):
        read()


def test_other_process_reads_a_pickled_file(registered, caf):
    file = registered.open("src/numbers.csv")
    file.readline()
    program = "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer).read())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(file),
        capture_output=True,
        check=True,
        cwd=caf.folder,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout == file.read()


def test_pyarrow_reads_tables_and_datasets(registered):
    assert pq.read_table("src/tables/part-0.parquet", filesystem=registered) == TABLE.slice(
        0, 25_000
    )
    dataset = pa.dataset.dataset("src/tables", filesystem=registered, format="parquet")
    assert dataset.to_table(filter=pa.dataset.field("number") >= 49_990).num_rows == 10


def test_polars_reads_tables(registered):
    for name in ("part-0.parquet", "part-1.parquet"):
        with registered.open(f"src/tables/{name}") as file:
            assert pl.read_parquet(file, columns=["number"]).height == 25_000
    with registered.open("src/numbers.csv") as file:
        assert pl.read_csv(file).height == 100
    dataset = pa.dataset.dataset("src/tables", filesystem=registered, format="parquet")
    assert (
        pl.scan_pyarrow_dataset(dataset).filter(pl.col("number") >= 49_990).collect().height == 10
    )


def test_duckdb_reads_tables(registered):
    with duckdb.connect(":memory:", config={}) as connection:
        connection.register_filesystem(registered)
        assert connection.sql(
            "SELECT sum(number) FROM 'caf://src/tables/*.parquet'"
        ).fetchall() == [(sum(range(50_000)),)]
        assert connection.sql("SELECT count(*) FROM 'caf://src/numbers.csv'").fetchall() == [(100,)]
        connection.unregister_filesystem("caf")
