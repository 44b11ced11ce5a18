"""Kept files of locations agree with the database, whatever happened to the files or to it."""

import hashlib
import os
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import StagingError
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.ledger_rows import STANDING_SCHEMA
from caf_pipeline.inventory.manifest import PartLocation
from caf_pipeline.inventory.objects import PartRange, SkipReason
from caf_pipeline.ledger import backup
from caf_pipeline.ledger.arrow import open_kept
from caf_pipeline.system.parquet import DEFAULT_BUDGET, Query
from caf_pipeline_tests.support.ledger_rows import (
    SOURCE,
    archive,
    batches,
    end,
    held,
    location,
    register,
    restore,
    restored,
    skip,
)
from caf_pipeline_tests.support.postgres import connected

S = ChunkState


@pytest.fixture
def known(ledger, tmp_path):
    """Return the keys that a plan would read from the files, compared with the database."""

    def read(by=ledger):
        folder, whole = tmp_path / "standing", tmp_path / "whole.parquet"
        shutil.rmtree(folder, ignore_errors=True)
        by.exports.changes(SOURCE, folder, tmp_path / "kept")
        by.exports.standing(SOURCE, whole)
        with Query(tmp_path / "query", DEFAULT_BUDGET, functions={}, macros=()) as query:
            query.table("standing", folder)
            rows = query.rows(f"SELECT {', '.join(STANDING_SCHEMA.names)} FROM standing")
        in_database = pq.read_table(whole).to_pylist()
        assert Counter(row[:5] for row in rows) == Counter(
            tuple(row.values())[:5] for row in in_database
        )
        assert Counter(row[5] for row in rows) == Counter(
            row["last_modified"] for row in in_database
        )
        return {row[0].decode() for row in rows if row[2] == "located"}

    return read


def files(tmp_path):
    return sorted(path for path in (tmp_path / "kept").iterdir() if path.suffix == ".parquet")


def test_files_have_located_claimed_and_skipped_objects(ledger, known):
    archive(ledger, ["b", "a"])
    register(ledger, ["c"], skips=[skip("d", SkipReason.COLD_STORAGE)])
    assert known() == {"a", "b"}
    archive(ledger, ["e"])
    assert known() == {"a", "b", "e"}


def test_a_source_without_locations_has_no_files(ledger, known, tmp_path):
    register(ledger, ["a"])
    assert (known(), files(tmp_path)) == (set(), [])


def test_files_stay_if_nothing_changed(ledger, known, tmp_path):
    archive(ledger, ["a"])
    known()
    before = [(path, path.stat().st_mtime_ns) for path in files(tmp_path)]
    assert (known(), [(path, path.stat().st_mtime_ns) for path in files(tmp_path)]) == (
        {"a"},
        before,
    )


def test_many_chunks_are_in_few_files_each_sorted_by_key(ledger, known, tmp_path):
    for number in range(20):
        archive(ledger, [f"{number * 7 % 20:02}", f"x{number:02}"])
        known()
    assert len(files(tmp_path)) <= 4
    for path in files(tmp_path):
        keys = pq.read_table(path)["key"].to_pylist()
        assert keys == sorted(keys)


@pytest.mark.parametrize("final", [S.WITHDRAWN, S.EXPIRED])
def test_chunks_out_of_good_standing_are_left_out(ledger, known, final):
    chunk = archive(ledger, ["a"])
    archive(ledger, ["b"])
    assert known() == {"a", "b"}
    end(ledger, chunk, S.DAMAGED)
    assert known() == {"a", "b"}
    end(ledger, chunk, final)
    assert known() == {"b"}
    archive(ledger, ["a"])
    assert known() == {"a", "b"}


def test_a_chunk_that_was_restored_is_there(ledger, known):
    archive(ledger, ["a"])
    known()
    restore(ledger, restored(1, ["a", "b"]), batches([location("a"), location("b")]), [])
    assert known() == {"a", "b"}


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("DELETE FROM file_locations WHERE file_path = 'a'", {"b"}),
        (
            "SET session_replication_role = replica; "
            "DELETE FROM file_locations WHERE file_path = 'a'",
            {"b"},
        ),
        ("TRUNCATE file_locations", set()),
    ],
)
def test_rows_deleted_from_the_database_are_left_out(ledger, known, database, change, left):
    archive(ledger, ["a", "b"])
    known()
    with connected(database) as connection:
        connection.execute(change)
    assert known() == left


def test_a_row_given_to_a_chunk_ends_with_it(ledger, known, database):
    archive(ledger, ["a", "b"])
    other = archive(ledger, ["c"])
    known()
    with connected(database) as connection:
        connection.execute("UPDATE file_locations SET caf_file_id = 2 WHERE file_path = 'b'")
    assert known() == {"a", "b", "c"}
    end(ledger, other, S.DAMAGED, S.WITHDRAWN)
    assert known() == {"a"}


def _rebuild(ledger, chunk, tmp_path):
    rows = list(batches([location("a"), location("b")]))
    with held(ledger, chunk) as lease:
        remote = replace(restored(1, ["a", "b"]), name=chunk)
        assert ledger.rebuilds.restore_rows(lease, remote, lambda: rows).restored == 1


def _restore_backup(ledger, chunk, tmp_path):
    programs = backup.Programs(ledger.database, embedded=True)
    backup.restore(programs, tmp_path / "ledger.dump", reason="a test")


@pytest.mark.thorough
@pytest.mark.parametrize("bring_back", [_rebuild, _restore_backup])
def test_a_row_deleted_after_another_came_back_is_left_out(
    ledger, known, database, tmp_path, bring_back
):
    chunk = archive(ledger, ["a", "b"])
    backup.back_up(ledger.database, tmp_path / "ledger.dump", embedded=True)
    _delete(database, "a")
    assert known() == {"b"}
    bring_back(ledger, chunk, tmp_path)
    _delete(database, "b")
    assert known() == {"a"}
    bring_back(ledger, chunk, tmp_path)
    assert known() == {"a", "b"}


def _delete(database, key):
    with connected(database) as connection:
        connection.execute("DELETE FROM file_locations WHERE file_path = %s", (key,))


def test_loads_that_replace_rows_lock_chunks_in_order(ledger, database):
    ended = [archive(ledger, [key]) for key in ("a", "b", "c")]
    other = archive(ledger, ["d"])
    with connected(database) as connection:  # the first chunk's row gets the last place
        connection.execute("UPDATE caf_files SET reason = 'moved' WHERE name = %s", (ended[0],))
    with (
        ThreadPoolExecutor() as threads,
        connected(database) as loading,
        connected(database) as second,
        connected(database) as first,
    ):
        lock = "SELECT name FROM caf_files WHERE name = ANY(%s) FOR NO KEY UPDATE"
        first.execute(lock, (ended[:1],))
        # The planner may choose this if all tables are large.
        loading.execute("SET enable_nestloop = off; SET enable_mergejoin = off")
        load = threads.submit(
            loading.execute,
            "UPDATE file_locations SET caf_file_id = own.caf_file_id FROM caf_files AS own "
            "WHERE name = %s",
            (other,),
        )
        while not second.execute(
            "SELECT FROM pg_locks WHERE NOT granted AND pid = %s", (loading.info.backend_pid,)
        ).fetchall():
            assert not load.done()
        free = second.execute(f"{lock} SKIP LOCKED", (ended,)).fetchall()
        assert {row.name for row in free} == set(ended[1:])
        second.rollback()
        first.rollback()
        load.result()


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TEMPORARY TABLE saved AS SELECT * FROM file_locations; DELETE FROM file_locations; "
        "INSERT INTO file_locations SELECT * FROM saved",
        "UPDATE file_locations SET part = 0, caf_file_id = caf_file_id",
    ],
)
def test_files_stay_if_the_same_rows_are_written_again(ledger, known, tmp_path, database, change):
    archive(ledger, ["a", "b"])
    restore(ledger, restored(1, ["a", "c"]), batches([location("a"), location("c")]), [])
    known()
    with connected(database) as connection:
        connection.execute(change)
    known()
    before = files(tmp_path)
    assert (known(), files(tmp_path)) == ({"a", "b", "c"}, before)


def test_files_stay_beside_a_part(ledger, known, tmp_path):
    archive(ledger, ["a", "b"])
    known()
    before = files(tmp_path)
    part = PartLocation(location("p"), 10, PartRange(1, 1, 0, 10), None, None, ObjectHeaders())
    restore(ledger, replace(restored(1, ["p"]), part=part), [], [])
    for _ in range(2):
        assert (known(), files(tmp_path)) == ({"a", "b", "p"}, before)


def test_a_wrong_count_hides_and_adds_no_row(ledger, known, database):
    archive(ledger, ["a", "b"])
    known()
    with connected(database) as connection:
        connection.execute("UPDATE caf_files SET row_count = 1")
    assert known() == {"a", "b"}
    assert known() == {"a", "b"}


@pytest.mark.parametrize(
    ("within", "keys"),
    [
        ((b"a", b"c"), {"b", "c"}),
        ((b"b\xff", None), {"c", "\ufffd"}),
        ((b"b\0c", b"c\0"), {"c"}),
        ((None, b"\xef\xbf\xbc"), {"a", "b", "c"}),
        ((None, b"b\xff"), {"a", "b"}),
        ((b"c", "\ufffd".encode()), {"\ufffd"}),
    ],
)
@pytest.mark.parametrize("state", ["located", "claimed", "skipped"])
def test_a_window_has_the_objects_of_its_keys(ledger, tmp_path, within, keys, state):
    every = ["a", "b", "c", "\ufffd"]
    if state == "located":
        archive(ledger, every)
    else:
        register(ledger, every if state == "claimed" else [], skips=map(skip, every))
    unsupported = skip("%FF", SkipReason.UNSUPPORTED_KEY)
    ledger.skips.record(SOURCE, [unsupported])
    path = tmp_path / "standing.parquet"
    ledger.exports.standing(SOURCE, path, within)
    after, until = within
    rows = pq.read_table(path).to_pylist()
    assert "unsupported_key" in {row["reason"] for row in rows}
    assert {
        row["key"].decode()
        for row in rows
        if row["standing"] == state
        and row["reason"] != "unsupported_key"
        and (after is None or row["key"] > after)
        and (until is None or row["key"] <= until)
    } == keys


def _truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)


def _of_other_rows(path):
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 1), path)


@pytest.mark.parametrize(
    "damage", [os.unlink, _truncate, _flip, _of_other_rows, lambda path: path.write_bytes(b"")]
)
def test_a_changed_file_is_written_again(ledger, known, tmp_path, damage):
    archive(ledger, ["a", "b"])
    known()
    (written,) = files(tmp_path)
    damage(written)
    assert known() == {"a", "b"}


def test_a_file_with_another_files_name_is_ignored(ledger, known, tmp_path):
    archive(ledger, [f"{number:03}" for number in range(9)])
    known()
    archive(ledger, ["a"])
    known()
    first, second = files(tmp_path)
    shutil.copyfile(first, second)
    assert len(known()) == 10


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.drop_columns(["last_modified"]),
        lambda table: table.replace_schema_metadata({"caf.chunks": "[]"}),
        lambda table: table.replace_schema_metadata({"caf.chunks": '{"1": 2}'}),
    ],
)
def test_a_file_of_another_version_is_written_again(ledger, known, tmp_path, change):
    archive(ledger, ["a", "b"])
    known()
    (written,) = files(tmp_path)
    with pq.ParquetFile(written) as file:
        changed = change(file.read().replace_schema_metadata(file.metadata.metadata))
    pq.write_table(changed, written)
    written.rename(written.with_stem(hashlib.sha256(written.read_bytes()).hexdigest()))
    assert known() == {"a", "b"}
    (again,) = files(tmp_path)
    assert again == written


def test_files_of_another_database_are_ignored(ledger, known, database):
    archive(ledger, ["a", "b"])
    assert known() == {"a", "b"}
    with connected(database) as connection:  # as if it were another database: ids repeat
        connection.execute(
            "TRUNCATE file_locations, caf_files, plans, claims RESTART IDENTITY CASCADE"
        )
    assert known() == set()
    archive(ledger, ["c", "d"])
    assert known() == {"c", "d"}


def test_files_of_another_source_are_ignored(ledger, known, tmp_path):
    archive(ledger, ["a", "b"], source="other")
    archive(ledger, ["a", "c"])
    ledger.exports.changes("other", tmp_path / "others", tmp_path / "kept")
    assert known() == {"a", "c"}


def test_files_newer_than_a_restored_database_are_ignored(ledger, known, database):
    archive(ledger, ["a"])
    archive(ledger, ["b", "c"])
    assert known() == {"a", "b", "c"}
    with connected(database) as connection:  # from before the second chunk, whose id is given again
        for table in ("replicas", "chunk_copies", "file_locations", "caf_files"):
            connection.execute(f"DELETE FROM {table} WHERE caf_file_id = 2")
        connection.execute("SELECT setval(pg_get_serial_sequence('caf_files', 'caf_file_id'), 1)")
    assert known() == {"a"}
    archive(ledger, ["d", "e"])
    assert known() == {"a", "d", "e"}


def test_a_file_from_a_backup_adds_no_stale_rows(ledger, known, tmp_path):
    chunk = archive(ledger, ["a"])
    archive(ledger, ["b"])
    known()
    shutil.copytree(tmp_path / "kept", tmp_path / "backup")
    end(ledger, chunk, S.DAMAGED, S.WITHDRAWN)
    known()
    archive(ledger, ["a", "c"])
    known()
    shutil.copytree(tmp_path / "backup", tmp_path / "kept", dirs_exist_ok=True)
    assert known() == {"a", "b", "c"}


def test_files_of_a_killed_process_are_removed(ledger, known, tmp_path):
    archive(ledger, ["a"])
    known()
    (tmp_path / "kept" / "..new.parquet.tmp").write_bytes(b"half of a file")
    (tmp_path / "kept" / ".new.parquet").write_bytes(b"whole, and not named")
    (tmp_path / "kept" / ".caf-spill-x").mkdir()
    assert known() == {"a"}
    assert [path.name for path in sorted((tmp_path / "kept").iterdir())] == [
        ".lock",
        files(tmp_path)[0].name,
    ]


def test_readers_keep_files_that_are_replaced(ledger, tmp_path):
    archive(ledger, ["a"])
    ledger.exports.changes(SOURCE, tmp_path / "one", tmp_path / "kept")
    archive(ledger, ["b"])
    ledger.exports.changes(SOURCE, tmp_path / "other", tmp_path / "kept")
    keys = [
        key
        for path in (tmp_path / "one").iterdir()
        for key in pq.read_table(path)["key"].to_pylist()
    ]
    assert keys == [b"a"]


def test_on_a_disk_without_hard_links_files_are_copied(ledger, known, monkeypatch):
    archive(ledger, ["a"])

    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert known() == {"a"}


def test_one_process_at_a_time_has_the_files(tmp_path):
    order = []
    inside = threading.Event()

    def second():
        inside.wait()
        with open_kept(tmp_path / "kept"):
            order.append("second")

    thread = threading.Thread(target=second)
    with open_kept(tmp_path / "kept"):
        thread.start()
        inside.set()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_folder_that_cannot_be_made_is_a_staging_error(ledger, tmp_path):
    archive(ledger, ["a"])
    (tmp_path / "kept").write_text("a file is in the way")
    with pytest.raises(StagingError, match="kept"):
        ledger.exports.changes(SOURCE, tmp_path / "standing", tmp_path / "kept")


def test_files_equal_to_the_database_do_not_differ(ledger, known, tmp_path):
    archive(ledger, ["a", "b"])
    known()
    archive(ledger, ["c"])  # not kept yet
    assert ledger.exports.compare_kept(SOURCE, tmp_path, tmp_path / "kept") == 0


@pytest.mark.parametrize("lie", ["file_path = 'x'", "etag = 'x'", "last_modified = now()"])
def test_comparison_finds_changed_rows_of_equal_number(ledger, known, tmp_path, database, lie):
    archive(ledger, ["a", "b"])
    known()
    with connected(database) as connection:
        connection.execute(f"UPDATE file_locations SET {lie} WHERE file_path = 'a'")
    assert ledger.exports.compare_kept(SOURCE, tmp_path, tmp_path / "kept") == 2
