"""Commands mark, list and ask about posts that nothing shows to be this ledger's."""

import json

import pytest

from caf_pipeline_tests.support.command_line import CAF, CommandLine, expect_error
from caf_pipeline_tests.support.forged_chunks import Forgery, put
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import new_ledger  # noqa: F401 - a fixture
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything
from caf_pipeline_tests.support.terminal_prompts import run_on_terminal


def lines_of(done):
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.fixture
def archived(tmp_path, ledger):
    """Return the run context of an archive with two objects, and a foreign post."""
    context = a_run_context(tmp_path, MemorySource({"a": b"own", "b": b"own, too"}), ledger)
    archive_everything(context)
    forged = Forgery(context.archive_id, {"a": b"forged", "new": b"forged, too"})
    put(context.store, forged.write(tmp_path / "forged"), context.archive_id)
    return context


@pytest.fixture
def caf(tmp_path, archived, database_url):
    folder = str(tmp_path / "store")
    caf = CommandLine(tmp_path, {"CAF_DATABASE_URL": database_url, "CAF_STORE__FOLDER": folder})
    caf.settings('[sources.src]\nbucket = "b"\npublic = true\n')
    return caf


@pytest.fixture
def added(caf):
    done = caf("doctor", "--add-unknown-posts", "--yes")
    assert done.status == 0, done.err
    return caf


def test_doctor_lists_an_unknown_post_with_its_keys(caf, archived):
    done = caf("doctor", "--json")
    assert done.status == 1
    first, second, post = lines_of(done)
    assert [(line["key"], line["change"]) for line in (first, second)] == [
        ("a", "version"),
        ("new", "new"),
    ]
    assert (post["block"], post["objects"], post["turn"]) == (1, 2, "operator")
    assert post["posted_at"].startswith("20")
    assert post["size_bytes"] > 0
    shown = caf("doctor", "--dry-run", "--add-unknown-posts")
    assert all(
        f"{change}: {key}" in shown.err for key, change in (("a", "version"), ("new", "new"))
    )
    assert len(archived.ledger.chunks.list()) == 1


def test_doctor_adds_nothing_without_an_answer(caf, archived):
    expect_error(caf("doctor", "--add-unknown-posts"), 2, "--yes")
    assert len(archived.ledger.chunks.list()) == 1


@pytest.mark.thorough
def test_doctor_asks_for_each_post_on_a_terminal(caf, archived):
    command = [CAF, "doctor", "--add-unknown-posts"]
    out = run_on_terminal(command, ["y"], folder=caf.folder, environment=caf.variables({}))
    assert b"restored, with 2 locations" in out
    assert len(archived.ledger.chunks.list()) == 2


def test_listing_marks_objects_of_an_unknown_post(added):
    listed = {line["key"]: line["status"] for line in lines_of(added("ls", "src", "--json"))}
    assert listed == {"a": "current", "b": "current", "new": "unknown_post"}
    done = added("ls", "src", "-l")
    assert "unknown_post  new" in done.out.decode()
    assert "1 object" in done.err
    versions = lines_of(added("ls", "src", "a", "--versions", "--json"))
    assert [line["status"] for line in versions] == ["current", "unknown_post"]
    assert lines_of(added("ls", "src", "--current", "--json"))[-1]["key"] == "b"


def test_get_marks_an_object_of_an_unknown_post(added, archived):
    done = added("get", "src", "new")
    assert done.out == b"forged, too"
    assert "unknown post" in done.err
    packed = added("get", "src", "a")
    assert (packed.out, "unknown post" in packed.err) == (b"own", False)
    version = archived.ledger.lookup.locate_versions("src", ["a"])["a"][1].row.object_version
    forged = added("get", "src", "a", "--object-version", version)
    assert (forged.out, "unknown post" in forged.err) == (b"forged", True)


def test_restore_marks_objects_of_an_unknown_post(added, tmp_path):
    done = added("restore", "src", str(tmp_path / "out"), "--json")
    *objects, sums = lines_of(done)
    marked = {line["key"]: line["unknown_post"] for line in objects}
    assert marked == {"a": False, "b": False, "new": True}
    assert sums["from_unknown_posts"] == 1
    assert (tmp_path / "out" / "a").read_bytes() == b"own"
    assert "1 object" in added("restore", "src", str(tmp_path / "out")).err


def test_doctor_sets_unknown_posts_aside(caf, archived):
    done = caf("doctor", "--leave-unknown-posts")
    assert done.status == 0, done.err
    assert "set aside" in done.out.decode()
    assert caf("doctor").status == 0
    assert len(archived.ledger.chunks.list()) == 1


def test_rebuild_leaves_unknown_posts_to_the_doctor(caf, archived):
    done = caf("rebuild", "--yes", "--json")
    expect_error(done, 1, "caf doctor")
    assert {line["kind"] for line in lines_of(done)[:-1]} == {"unknown_post", "known"}
    assert archived.ledger.rebuilds.began_at("src") is None


def test_rebuild_into_a_new_ledger_asks_and_marks_nothing(caf, archived, new_ledger):
    fresh = new_ledger()
    caf.environment["CAF_DATABASE_URL"] = fresh.url
    expect_error(caf("rebuild"), 2, "--yes")
    assert fresh.chunks.list() == []
    assert caf("rebuild", "--yes").status == 0
    assert [chunk.from_unknown_post for chunk in fresh.chunks.list()] == [False, False]


def test_no_command_and_no_file_shows_the_mac_key(caf, archived, tmp_path):
    key = archived.ledger.sources.post_key("src")
    done = [
        caf(*command)
        for command in (
            ("doctor", "--json"),
            ("rebuild", "--json"),
            ("status", "--json"),
            ("ls", "src", "--json"),
        )
    ]
    shown = b"".join(result.out + result.err.encode() for result in done)
    for path in tmp_path.rglob("*"):
        if path.is_file() and "postgres" not in path.parts:
            shown += path.read_bytes()
    assert key not in shown
    assert key.hex().encode() not in shown
