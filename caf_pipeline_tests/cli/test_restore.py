"""`caf restore` into a folder: results, kills, and what it must never do."""

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from caf_pipeline.caf.archive import Limits
from caf_pipeline.cli import terminal
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.retrieval.file_names import key_of
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.system.files_below import FilesBelow
from caf_pipeline_tests.support.command_line import (
    KEYS,
    CommandLine,
    archive_source,
    expect_error,
    opened_context,
    source_text,
)
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.plans import MOMENT

BODIES = {
    **{f"some/key-{number:02}": os.urandom(10_000 + number) for number in range(30)},
    "some/large": os.urandom(3 << 20),
    "empty": b"",
    "a": b"a file",
    "a-b": b"between",
    "a/b": b"below the file's name",
    "folder/": b"",
    "/absolute": b"1",
    "x//y": b"2",
    "../../outside": b"3",
    "./here": b"4",
    ".caf-0123456789abcdef.partial": b"5",
    ".caf~x": b"6",
    "n" * 600 + "/ü": b"7",
    "tab\there\nline": b"8",
}


def with_archived(folder, databases, source):
    """Return a command line that has archived these objects."""
    caf = CommandLine(folder, KEYS | {"CAF_DATABASE_URL": databases.take().url})
    caf.settings(source_text("http://127.0.0.1:9", "b", target_size="16MiB"))
    archive_source(caf, objects=source)
    return caf


@pytest.fixture(scope="module")
def archived(tmp_path_factory, databases):
    source = MemorySource(
        BODIES | {"skipped/key": b"cold"}, unavailable={"skipped/key": (SkipReason.COLD_STORAGE, 0)}
    )
    return with_archived(tmp_path_factory.mktemp("archived"), databases, source)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


def files(folder):
    """Return the files below a folder, by the key of each path."""
    return {
        key_of(path.relative_to(folder).parts): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def sums(done):
    return json.loads(done.out.splitlines()[-1])


@pytest.mark.thorough
def test_every_key_is_restored_and_nothing_outside_the_folder(archived, folder):
    done = archived("restore", "src", str(folder))
    assert done.status == 0, done.err
    assert files(folder) == BODIES
    assert list(folder.parent.iterdir()) == [folder]
    assert (folder / "some" / "key-07").read_bytes() == BODIES["some/key-07"]
    assert {path.stat().st_mtime for path in folder.rglob("*") if path.is_file()} == {
        MOMENT.timestamp()
    }


@pytest.mark.parametrize("options", [[], ["--current"], ["--versions", "all"]])
def test_progress_counts_first_and_then_knows_the_total(archived, folder, monkeypatch, options):
    shown = []

    def progress(title, total_bytes=None):
        shown.append((title.split()[0], total_bytes))
        return terminal.object_progress(title, total_bytes)

    monkeypatch.setattr("caf_pipeline.cli.restore.object_progress", progress)
    assert archived("restore", "src", "some/", str(folder), *options).status == 0
    total_bytes = sum(len(body) for key, body in BODIES.items() if key.startswith("some/"))
    assert shown == [("counting", None), ("restoring", total_bytes)]


def test_a_second_restore_writes_only_missing_objects(archived, folder):
    assert archived("restore", "src", str(folder)).status == 0
    (folder / "some" / "key-03").unlink()
    done = sums(archived("restore", "src", str(folder), "--json"))
    assert (done["restored"], done["equal"], done["different"], done["failed"]) == (
        1,
        len(BODIES) - 1,
        0,
        0,
    )
    assert files(folder) == BODIES


def test_a_prefix_is_restored_alone(archived, folder):
    assert archived("restore", "src", "some/key-0", str(folder)).status == 0
    assert files(folder) == {
        key: body for key, body in BODIES.items() if key.startswith("some/key-0")
    }


def test_a_different_file_is_replaced_only_by_force(archived, folder):
    (folder / "some").mkdir(parents=True)
    mine = folder / "some" / "key-03"
    mine.write_bytes(bytes(len(BODIES["some/key-03"])))
    expect_error(archived("restore", "src", "some/", str(folder)), 1, "1 object of 31", "--force")
    assert mine.read_bytes() == bytes(mine.stat().st_size)
    assert archived("restore", "src", "some/", str(folder), "--force").status == 0
    assert mine.read_bytes() == BODIES["some/key-03"]


def test_failed_and_different_objects_are_lines_of_json(archived, folder):
    (folder / "some").mkdir(parents=True)
    (folder / "some" / "key-03").write_bytes(b"other")
    with spoilt(archived, "some/key-04"):
        done = archived("restore", "src", "some/key-0", str(folder), "--json")
    lines = {line["key"]: line for line in map(json.loads, done.out.splitlines()[:-1])}
    results = dict.fromkeys((key for key in BODIES if key.startswith("some/key-0")), "restored")
    assert {key: line["result"] for key, line in lines.items()} == results | {
        "some/key-03": "different",
        "some/key-04": "failed",
    }
    assert lines["some/key-03"]["path"] == "some/key-03"
    assert lines["some/key-03"]["error"]
    assert lines["some/key-04"]["path"] is None
    assert "some/key-04" in lines["some/key-04"]["error"]
    assert lines["some/key-05"]["error"] is None
    assert (done.status, sums(done)["restored"]) == (9, 8)


def test_objects_that_are_not_archived_are_counted(archived, folder):
    source = MemorySource(BODIES | {"some/later-1": b"1", "some/later-2": b"2", "other": b"3"})
    with opened_context(archived, run="run-2", objects=source) as context:
        snapshot = inventories.take_inventory(context, after=b"!", until=b"some/z")
        (chunk,) = planning.cut_plan(context, snapshot).chunks
        try:
            done = archived("restore", "src", "some/", str(folder))
            preview = sums(archived("restore", "src", "some/", str(folder), "--dry-run", "--json"))
            whole = sums(archived("restore", "src", str(folder), "--dry-run", "--json"))
        finally:
            chunk_steps.withdraw(context, chunk.name)
    assert done.status == 0, done.err
    assert "2 objects not archived" in done.err
    assert "`caf status src`" in done.err
    assert (preview["not_yet_archived"], preview["skipped"]) == (2, 0)
    assert (whole["not_yet_archived"], whole["skipped"]) == (3, 1)


def test_an_existing_folder_named_like_a_prefix_is_a_destination(archived, tmp_path):
    (archived.folder / "some").mkdir()
    try:
        assert archived("restore", "src", "some/", "--dry-run").status == 0
        assert archived("restore", "src", f"{tmp_path}/new/").status == 0
    finally:
        (archived.folder / "some").rmdir()


def test_a_dry_run_writes_nothing(archived, folder):
    done = archived("restore", "src", str(folder), "--dry-run")
    assert (done.status, folder.exists(), len(done.out.splitlines())) == (0, False, len(BODIES))
    assert f"{len(BODIES)} would be written" in done.err
    folder.mkdir()
    done = sums(archived("restore", "src", "some/", str(folder), "--dry-run", "--json"))
    assert (done["would_restore"], done["equal"], list(folder.iterdir())) == (31, 0, [])


def test_a_link_in_the_folder_is_not_followed(archived, folder, tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    folder.mkdir()
    (folder / "some").symlink_to(elsewhere)
    (folder / "a-b").symlink_to(elsewhere / "a-b")
    assert archived("restore", "src", str(folder)).status == 0
    assert list(elsewhere.iterdir()) == []
    assert files(folder) == BODIES


@pytest.mark.thorough
def test_a_killed_restore_to_a_folder_continues(archived, folder):
    for at_least in (1, 10, 25):
        with archived.start("restore", "src", str(folder), "--json") as process:
            for _ in range(at_least):
                if not process.stdout.readline():
                    break
            process.send_signal(signal.SIGKILL)
        assert all(BODIES.get(key) in (body, None) for key, body in files(folder).items())
    (folder / "some" / ".caf-0123456789abcdef.partial").write_bytes(b"half")
    done = archived("restore", "src", str(folder))
    assert done.status == 0, done.err
    assert files(folder) == BODIES


@pytest.mark.parametrize("first", ["", "in/it"], ids=["the outer", "the inner"])
def test_two_restores_never_share_a_parent_folder(archived, folder, first):
    inner = folder / "in" / "it"
    inner.mkdir(parents=True)
    with FilesBelow(folder / first, force=False) as files:
        files.own()
        expect_error(
            archived("restore", "src", str(folder if first else inner)), 10, "another process"
        )
        assert archived("restore", "src", "a-b", str(folder.parent / "beside")).status == 0
    assert archived("restore", "src", "a-b", str(inner)).status == 0


@contextlib.contextmanager
def spoilt(archived, *keys):
    """Replace the bytes of these objects in the store while the context lasts."""
    (file,) = archived.folder.glob(".caf/store/chunks/*.caf")
    right = wrong = file.read_bytes()
    for key in keys:
        wrong = wrong.replace(BODIES[key], BODIES[key][::-1])
    file.write_bytes(wrong)
    try:
        yield
    finally:
        file.write_bytes(right)


def test_wrong_bytes_are_never_restored(archived, folder):
    wrong = {"some/key-03", "some/large"}
    with spoilt(archived, *wrong):
        expect_error(archived("restore", "src", str(folder)), 9, f"2 objects of {len(BODIES)} ")
    assert files(folder) == {key: body for key, body in BODIES.items() if key not in wrong}


def test_a_disk_that_cannot_be_written_is_one_sentence(archived, new_disk):
    disk = new_disk(1 << 20)
    (disk.folder / "out").mkdir()
    disk.read_only()
    expect_error(archived("restore", "src", str(disk.folder / "new")), 8, "Read-only file system")
    expect_error(archived("restore", "src", str(disk.folder / "out")), 8, "Read-only file system")


def test_a_dry_restore_refuses_an_unusable_folder(archived, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").symlink_to("nothing/here")
    (tmp_path / "loop").symlink_to("loop")
    for name in (
        "file",
        "file/x/y",
        "broken",
        "broken/x",
        "loop",
        "loop/x",
        "q" * 300,
        f"new/{'q' * 300}/x",
        "x/" * 3000,
    ):
        for options in (["--dry-run"], []):
            expect_error(
                archived("restore", "src", "a", f"{tmp_path}/{name}", *options), 8, "written"
            )
    (tmp_path / "link").symlink_to(".")
    for name in ("link", "link/new", "new/x/y", "../" * 9):
        done = archived("restore", "src", "a", f"{tmp_path}/{name}", "--dry-run")
        assert (done.status, len(done.out.splitlines())) == (0, 3), done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "broken",
        "file",
        "link",
        "loop",
        "new",
    ]
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_may_be_named_like_an_address(archived):
    assert archived("restore", "src", "a-b", "./s3:/bucket/x").status == 0
    assert (archived.folder / "s3:/bucket/x/a-b").read_bytes() == BODIES["a-b"]


@pytest.mark.parametrize(
    "command", [["ls"], ["du"], ["check"], ["restore"], ["export-references", "-o", "skipped.json"]]
)
def test_restoring_only_a_skipped_key_names_the_reason(archived, command):
    name, *options = command
    to = ["out"] if name == "restore" else []
    expect_error(
        archived(name, "src", "skipped/key", *to, *options), 11, "'skipped/key'", "cold_storage"
    )


def test_the_documented_json_fields_are_printed(archived, folder):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "read-from-programs.md").read_text(
        encoding="utf-8"
    )
    rows = page.partition("### As JSON")[2].partition("## One object")[0].splitlines()
    named = [
        re.sub(r"\([^)]*\)", "", row.split("|")[3])
        for row in rows
        if row.startswith("| ") and "`" in row
    ]
    an_object, level, total, written, sums, _, checked = [
        set(re.findall(r"`(\w+)`", row)) for row in named
    ]

    def printed(*arguments):
        return [set(json.loads(line)) for line in archived(*arguments, "--json").out.splitlines()]

    assert printed("find", "src", "a") == [an_object]
    assert printed("ls", "src", "a") == [an_object, an_object, level]
    assert printed("du", "src", "some/") == [total]
    assert {"result": "would_restore", "error": None}.items() <= json.loads(
        archived("restore", "src", "a-b", str(folder), "--dry-run", "--json").out.splitlines()[0]
    ).items()
    assert printed("restore", "src", "a-b", str(folder), "--dry-run") == [
        written,
        sums - {"restored"},
    ]
    assert printed("restore", "src", "a-b", str(folder)) == [written, sums - {"would_restore"}]
    assert printed("check", "src", "a-b", "--full") == [checked]


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory, databases):
    """A source with two versions of `a`, a key `a~caf-v-<ETag>`, and the older ETag."""
    source = MemorySource({"a": b"first", "b": b"only"})
    etag = source.object("a").etag
    source.bodies[f"a~caf-v-{etag}"] = b"takes the name"
    caf = with_archived(tmp_path_factory.mktemp("rewritten"), databases, source)
    source.bodies["a"] = b"second"
    archive_source(caf, run="run-2", objects=source)
    return caf, etag


def test_every_version_is_listed_with_its_identity(rewritten):
    caf, etag = rewritten
    listed = [
        json.loads(line) for line in caf("ls", "src", "--versions", "--json").out.splitlines()
    ]
    versions = [
        (version["etag"], version["status"], version["size_bytes"])
        for version in listed
        if version["key"] == "a"
    ]
    assert versions[0][1:] == ("current", 6)
    assert versions[1:] == [(etag, "older", 5)]


def test_older_versions_are_restored_beside_the_current_one(rewritten, folder):
    caf, etag = rewritten
    contents = {
        "a": b"second",
        "b": b"only",
        f"a~caf-v-{etag}": b"takes the name",
        f"a~caf-v-{etag}~": b"first",
    }
    for restored in (4, 0):
        done = sums(caf("restore", "src", str(folder), "--versions", "all", "--json"))
        assert (done["restored"], done["equal"], done["failed"]) == (restored, 4 - restored, 0)
    assert files(folder) == contents


def test_omitted_older_versions_are_counted(rewritten, folder):
    caf, _ = rewritten
    assert "1 older version" in caf("ls", "src").err
    assert sums(caf("restore", "src", str(folder), "--json"))["older_versions"] == 1


@pytest.fixture
def versioned(tmp_path, database_url, s3_server, new_bucket, monkeypatch):
    """Archive three versions of `huge` in parts; return the bucket and the bodies, oldest first."""
    terms = planning.plan_terms
    monkeypatch.setattr(
        planning,
        "plan_terms",
        lambda *args: replace(terms(*args), limits=Limits(max_bytes=160_000)),
    )
    new_bucket.keep_versions()
    bodies = [os.urandom(400_000) for _ in range(3)]
    for body in bodies:
        new_bucket.put("huge", body)
        time.sleep(1)  # LastModified has whole seconds
    caf = CommandLine(tmp_path, KEYS | {"CAF_DATABASE_URL": database_url})
    caf.settings(source_text(s3_server, new_bucket.name, target_size="128KiB", versions="all"))
    archive_source(caf)
    return caf, bodies


def test_every_version_in_parts_is_restored(versioned, folder):
    caf, bodies = versioned
    done = sums(caf("restore", "src", str(folder), "--versions", "all", "--json"))
    assert (done["restored"], done["failed"]) == (3, 0)
    assert files(folder)["huge"] == bodies[-1]
    assert set(files(folder).values()) == set(bodies)


def test_the_version_of_a_time_is_restored_from_its_parts(versioned, folder):
    caf, bodies = versioned
    listed = [
        json.loads(line) for line in caf("ls", "src", "--versions", "--json").out.splitlines()
    ]
    for version, body in zip(reversed(listed), bodies, strict=True):
        caf("restore", "src", str(folder), "--as-of", version["last_modified"], "--force")
        assert files(folder) == {"huge": body}
