"""Locations in the table, and names of identities in the database and in Python."""

from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise

import psycopg
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import ClaimConflict
from caf_pipeline.inventory.headers import HEADERS, ObjectHeaders
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.inventory.manifest import LOCATION_SCHEMA
from caf_pipeline.inventory.objects import (
    is_rewritten,
    object_version,
    rewritten_version,
    version_id_of,
)
from caf_pipeline.ledger.arrow import header_set_ids
from caf_pipeline.ledger.claims import copy_location_batches
from caf_pipeline.ledger.engine import LedgerEngine
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.sql_files import query
from caf_pipeline_tests.support.ledger_rows import archive, location_values, register

ETAG = "00e1f2d3c4b5a69788796a5b4c3d2e1f"
VERSION_ID = "3sL4kqtJlcpXroDTDmJ.rmSpXd3dIbrHY_MTRCxvjVBH"
WRITTEN = "2026-11-21T23:10:05.000000Z"

# identity -> version id, ETag, size and time of a rewrite, as in the tables
IDENTITIES = {
    "one upload": (f"etag:{ETAG}:6000", None, ETAG, 6000, None),
    "nothing": (f"etag:{ETAG}:0", None, ETAG, 0, None),
    "an upload in parts": (f"etag:{ETAG}-12:6000", None, f"{ETAG}-12", 6000, None),
    "a version": (VERSION_ID, VERSION_ID, ETAG, 6000, None),
    "written again": (
        f"etag:{ETAG}:6000:{WRITTEN}",
        None,
        ETAG,
        6000,
        datetime.fromisoformat(WRITTEN),
    ),
    "any ETag": ('etag:W/"\u00e9:1":7', None, 'W/"\u00e9:1"', 7, None),
    "no ETag": ("etag::7", None, "", 7, None),
    "an early year": (
        "etag::7:0031-01-01T00:00:00.000001Z",
        None,
        "",
        7,
        datetime(31, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    ),
}
IDENTITY = "object_version(version_id, etag, size_bytes, rewritten_at)"


def row_of(object_version, version_id, etag, size_bytes, rewritten_at):
    written = rewritten_at or datetime(2026, 1, 1, tzinfo=UTC)
    return LocationRow(
        "k", object_version, version_id, 512, 512 + size_bytes, etag, written, bytes(32)
    )


@pytest.fixture
def connection(database_url):
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.mark.parametrize("name", IDENTITIES)
def test_the_database_names_an_identity_as_python_does(connection, name):
    version, version_id, etag, size_bytes, rewritten_at = IDENTITIES[name]
    values = (version_id or "", etag, size_bytes, rewritten_at and rewritten_at.isoformat())
    query = "SELECT object_version(%s::text, %s::text, %s, coalesce(%s::timestamptz, '-infinity'))"
    assert connection.execute(query, values).fetchone() == (version,)
    assert version_id_of(version) == (version_id or "")
    assert is_rewritten(version, etag, size_bytes) == (rewritten_at is not None)


SCHEMA_OF_HEADERS = pa.schema([LOCATION_SCHEMA.field(name) for name in (*HEADERS, "user_metadata")])

any_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=50)
hostile_text = (
    any_text
    | st.text(st.sampled_from("\\\t\n\rNxb.\"',{}é🗄 "), max_size=12)
    | st.sampled_from([r"\N", r"\.", r"\x41", ""])
)
sizes = st.integers(0, 2**53) | st.integers(0, 12)
etags = (
    st.from_regex(r"[0-9a-f]{32}(-[0-9]{1,7})?", fullmatch=True)
    | st.from_regex(r"[0-9a-fA-F:]{30,33}", fullmatch=True)
    | hostile_text
)


@st.composite
def location_rows(draw):
    """Return location rows with any text."""
    size_bytes, start, etag = draw(sizes), draw(st.integers(0, 2**62)), draw(etags)
    version_id = draw(
        st.none() | hostile_text.filter(lambda text: text and not text.startswith("etag:"))
    )
    last_modified = draw(st.datetimes(timezones=st.just(UTC)))
    version = object_version(version_id, etag, size_bytes)
    return LocationRow(
        key=draw(hostile_text),
        object_version=version
        if version_id or draw(st.booleans())
        else rewritten_version(version, last_modified),
        version_id=version_id,
        start_byte=start,
        end_byte=start + size_bytes,
        etag=etag,
        last_modified=last_modified,
        sha256=draw(st.binary(min_size=32, max_size=32)),
    )


AS_GIVEN = f"""
    SELECT file_path, {IDENTITY}, nullif(version_id, ''), start_byte, end_byte, etag, last_modified,
        sha256
    FROM loading ORDER BY ctid
"""


@pytest.mark.thorough
@settings(max_examples=50)
@given(rows=st.lists(st.lists(location_rows(), max_size=5), max_size=3))
def test_locations_of_any_text_are_loaded_as_given(database, rows):
    given_batches = [
        pa.RecordBatch.from_pylist([location_values(row) for row in some], LOCATION_SCHEMA)
        for some in rows
    ]
    expected = [row for some in rows for row in some]
    with closing(LedgerEngine(database)) as engine, engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TEMPORARY TABLE loading (LIKE file_locations INCLUDING DEFAULTS) ON COMMIT DROP"
        )
        count = copy_location_batches(connection, "loading", 7, 2**31, given_batches)
        loaded = connection.exec_driver_sql(AS_GIVEN).all()
        same = connection.exec_driver_sql(
            "SELECT DISTINCT source_id, caf_file_id, part FROM loading"
        ).all()
    assert count == len(expected)
    assert [LocationRow(*row) for row in loaded] == expected
    assert set(same) <= {(7, 2**31, 0)}


any_headers = st.builds(
    ObjectHeaders,
    *[hostile_text] * len(HEADERS),
    st.dictionaries(hostile_text, hostile_text, max_size=3),
)


@given(rows=st.lists(st.none() | any_headers, max_size=8), first=st.integers(0, 3))
@example([None, ObjectHeaders(), None], 1)
@example([None, None], 0)
def test_headers_of_any_text_are_named_as_given(rows, first):
    columns = [
        {**asdict(row), "user_metadata": sorted(row.user_metadata.items())} if row else {}
        for row in rows
    ]
    batch = pa.RecordBatch.from_pylist(columns, SCHEMA_OF_HEADERS).slice(first)
    ids, firsts = header_set_ids(batch)
    assert ids.to_pylist() == [row and row.id for row in rows[first:]]
    assert set(ids.take(firsts).to_pylist()) == {row.id for row in rows[first:] if row}
    assert len(firsts) == len({row.id for row in rows[first:] if row})


# --- nothing is done twice ---


@pytest.mark.parametrize("key", ["a, \\x01 (b)=(c)", "a, b, c, 1, d", "x"])
def test_a_key_claimed_twice_is_named_exactly(database, key):
    ledger = Ledger(database)
    register(ledger, [key])
    with pytest.raises(ClaimConflict) as refused:
        register(ledger, [key])
    assert f"'{key}' is" in str(refused.value)


# --- plans ---


@pytest.fixture
def plan_of(connection):
    """Return the plan of a query on large tables, none of which may be read from its start."""

    def plan(statement, **values):
        for other_way in ("seqscan", "bitmapscan", "hashjoin", "mergejoin"):
            connection.execute(f"SET enable_{other_way} = off")
        for name, value in values.items():
            statement = statement.replace(f"%({name})s", value)
        return "\n".join(line for (line,) in connection.execute(f"EXPLAIN {statement}"))

    return plan


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param(query("claimed_but_located"), id="claimed, but located"),
        pytest.param("SELECT * FROM objects_in_parts WHERE source_id = 1", id="parts"),
        pytest.param(
            query("export_part_locations").replace("%(source_id)s", "1"), id="parts exported"
        ),
    ],
)
def test_one_object_version_is_found_in_an_index(plan_of, statement):
    plan = plan_of(statement, plan_id="1", good="'{located}'", caf_file_id="1", id="1")
    conditions = [
        after for before, after in pairwise(plan.splitlines()) if "using file_locations_" in before
    ]
    assert conditions
    # A chunk with a part has no other row.
    assert all(
        "Index Cond" in condition
        and ("(rewritten_at = " in condition or "(caf_file_id = parts.caf_file_id)" in condition)
        for condition in conditions
    )


def test_claims_of_what_is_restored_are_found_in_the_index(plan_of):
    plan = plan_of(query("claims_of_restored"), caf_file_id="1")
    assert any(
        "Index Cond" in line and "(rewritten_at = restored.rewritten_at" in line
        for line in plan.splitlines()
    )


def test_a_page_of_rows_begins_and_ends_in_the_index(plan_of):
    values = {"source": "'src'", "start": "'a'", "end": "'b'", "limit": "10", "good": "'{located}'"}
    (condition,) = [
        after
        for before, after in pairwise(plan_of(query("list_page"), **values).splitlines())
        if "using file_locations_pkey" in before
    ]
    assert "file_path >= 'a'" in condition
    assert "file_path < 'b'" in condition


def test_a_page_of_keys_is_read_from_the_index_alone(plan_of):
    plan = plan_of(
        query("archived_keys") % {"source": "'src'", "start": "'a'", "end": "'b'", "limit": 10}
    )
    assert "Index Only Scan" in plan
    assert "file_locations_pkey" in plan


def test_a_load_of_a_tenth_makes_statistics(ledger, connection):
    def counted():
        return connection.execute(
            "SELECT reltuples FROM pg_class WHERE relname = 'file_locations'"
        ).fetchone()[0]

    archive(ledger, [f"{number:03}" for number in range(100)])
    assert counted() == 100
    archive(ledger, ["few"])
    assert counted() == 100
    archive(ledger, [f"more {number:03}" for number in range(61)])
    assert counted() == 162
