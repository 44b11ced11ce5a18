"""Locations as the table has them: packed by the database and by Arrow alike, and read as they were given."""

from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import LedgerError
from caf_pipeline.inventory.manifest import LOCATION_SCHEMA
from caf_pipeline.ledger import copy, import_chunk
from caf_pipeline.ledger.arrow import location_batches, location_identities
from caf_pipeline.ledger.copy import copy_location_batches
from caf_pipeline.ledger.export import _PARTS
from caf_pipeline.ledger.keys import _KEYS
from caf_pipeline.ledger.postgres import Ledger
from caf_pipeline.ledger.records import LocationRow
from caf_pipeline_tests.contracts.ledger import batches, bring_to, holder, location, register

ETAG = "00e1f2d3c4b5a69788796a5b4c3d2e1f"
VERSION_ID = "3sL4kqtJlcpXroDTDmJ.rmSpXd3dIbrHY_MTRCxvjVBH"
WRITTEN = "2026-11-21T23:10:05.000000Z"

# (object version, part, version id, ETag, length) -> (identity, content)
PACKED = {
    "one upload": ((f"etag:{ETAG}:6000", 0, None, ETAG, 6000), ("02" + ETAG + "6000", None)),
    "digits that are odd": ((f"etag:{ETAG}:60001", 0, None, ETAG, 60001), ("02" + ETAG + "060001", None)),
    "nothing": ((f"etag:{ETAG}:0", 0, None, ETAG, 0), ("02" + ETAG + "00", None)),
    "an upload in parts": ((f"etag:{ETAG}-12:6000", 0, None, f"{ETAG}-12", 6000), ("03" + ETAG + "000012" + "6000", None)),
    "the most parts": ((f"etag:{ETAG}-10000:7", 0, None, f"{ETAG}-10000", 7), ("03" + ETAG + "010000" + "07", None)),
    "a version": (
        (VERSION_ID, 0, VERSION_ID, ETAG, 6000),
        ("01" + VERSION_ID.encode().hex(), "12" + ETAG + "6000"),
    ),
    "a version uploaded in parts": (
        (VERSION_ID, 0, VERSION_ID, f"{ETAG}-2", 70),
        ("01" + VERSION_ID.encode().hex(), "13" + ETAG + "000002" + "70"),
    ),
    "written again": (
        (f"etag:{ETAG}:6000:{WRITTEN}", 0, None, ETAG, 6000),
        ("01" + f"etag:{ETAG}:6000:{WRITTEN}".encode().hex(), "02" + ETAG + "6000"),
    ),
    "an ETag in capitals": (
        (f"etag:{ETAG.upper()}:7", 0, None, ETAG.upper(), 7),
        ("01" + f"etag:{ETAG.upper()}:7".encode().hex(), None),
    ),
    "any ETag": (('etag:W/"é:1":7', 0, None, 'W/"é:1"', 7), ("01" + 'etag:W/"é:1":7'.encode().hex(), None)),
    "no ETag": (("etag::7", 0, None, "", 7), ("01" + b"etag::7".hex(), None)),
    "a size with a zero before it": (
        (f"etag:{ETAG}:06000", 0, None, ETAG, 6000),
        ("01" + f"etag:{ETAG}:06000".encode().hex(), "02" + ETAG + "6000"),
    ),
    "no parts": ((f"etag:{ETAG}-0:7", 0, None, f"{ETAG}-0", 7), ("01" + f"etag:{ETAG}-0:7".encode().hex(), None)),
    "another size than the length": ((f"etag:{ETAG}:6000", 0, None, ETAG, 5999), ("02" + ETAG + "6000", "02" + ETAG + "5999")),
    "another ETag": ((f"etag:{ETAG}:6000", 0, None, "other", 6000), ("02" + ETAG + "6000", "01" + b"etag:other:6000".hex())),
    "a version id that looks like none": (
        (f"etag:{ETAG}:6000", 0, f"etag:{ETAG}:6000", ETAG, 6000),
        ("02" + ETAG + "6000", "12" + ETAG + "6000"),
    ),
    "a version of any ETag": ((VERSION_ID, 0, VERSION_ID, "x", 7), ("01" + VERSION_ID.encode().hex(), "11" + b"etag:x:7".hex())),
    "an end before the start": ((f"etag:{ETAG}:-7", 0, None, ETAG, -7), ("01" + f"etag:{ETAG}:-7".encode().hex(), None)),
    "a part": (
        (f"etag:{ETAG}:6000", 2, None, ETAG, 3000),
        ("00" + "00000002" + f"etag:{ETAG}:6000".encode().hex(), "02" + ETAG + "3000"),
    ),
    "a part of a version": (
        (VERSION_ID, 100_001, VERSION_ID, ETAG, 3000),
        ("00" + "000186a1" + VERSION_ID.encode().hex(), "12" + ETAG + "3000"),
    ),
    "an empty version": (("", 0, None, ETAG, 7), ("01", "02" + ETAG + "07")),
}
READ = (
    "location_version(identity), location_part(identity), location_version_id(identity, content),"
    " location_etag(identity, content), location_size(identity, content)"
)


def hexadecimal(*values):
    return tuple(value.hex() if value is not None else None for value in values)


def row_of(object_version, part, version_id, etag, size_bytes):
    return LocationRow("k", object_version, version_id, 512, 512 + size_bytes, etag, datetime(2026, 1, 1, tzinfo=UTC), bytes(32))


@pytest.fixture
def connection(database_url):
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.mark.parametrize("name", PACKED)
def test_the_database_packs_and_reads_each_form(connection, name):
    told, packed = PACKED[name]
    query = "SELECT location_identity(%s, %s), location_content(%s, %s, %s::text, %s, %s)"
    assert hexadecimal(*connection.execute(query, (*told[:2], *told)).fetchone()) == packed
    values = [value and bytes.fromhex(value) for value in packed]
    read = connection.execute(f"SELECT {READ} FROM (SELECT %s::bytea AS identity, %s::bytea AS content) AS row", values)
    assert read.fetchone() == told


@pytest.mark.parametrize("name", [name for name, (told, _) in PACKED.items() if told[1] == 0])
def test_arrow_packs_as_the_database_does(name):
    told, packed = PACKED[name]
    (batch,) = location_batches(batches([row_of(*told)]))
    assert hexadecimal(*batch.select(["identity", "content"]).to_pylist()[0].values()) == packed


def test_rows_of_all_forms_are_packed_together_as_they_are_alone():
    rows = [row_of(*told) for told, _ in PACKED.values() if told[1] == 0]
    alone = [packed for row in rows for one in location_batches(batches([row])) for packed in one.to_pylist()]
    together = pa.Table.from_batches(batches(rows)).combine_chunks().to_batches()[0]
    for first, count in ((0, len(rows)), (3, 9), (0, 0)):
        (packed,) = location_batches([together.slice(first, count)])
        assert packed.to_pylist() == alone[first : first + count]


any_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=50)
hostile_text = (
    any_text | st.text(st.sampled_from("\\\t\n\rNxb.\"',{}é🗄 "), max_size=12) | st.sampled_from([r"\N", r"\.", r"\x41", ""])
)
sizes = st.integers(0, 2**53) | st.integers(0, 12)
etags = (
    st.from_regex(r"[0-9a-f]{32}(-[0-9]{1,7})?", fullmatch=True)
    | st.from_regex(r"[0-9a-fA-F:]{30,33}", fullmatch=True)
    | hostile_text
)


@st.composite
def object_versions(draw):
    size = draw(sizes | st.from_regex(r"[0-9]{1,20}", fullmatch=True))
    return f"etag:{draw(etags)}:{size}{draw(st.sampled_from(['', ':x', chr(10)]))}"


@st.composite
def location_rows(draw):
    """Rows as ours are, and rows of any text."""
    size_bytes, start, etag = draw(sizes), draw(st.integers(0, 2**62)), draw(etags)
    version = draw(st.just(f"etag:{etag}:{size_bytes}") | object_versions() | hostile_text)
    return LocationRow(
        key=draw(hostile_text),
        object_version=version,
        version_id=draw(st.sampled_from([None, version])),
        start_byte=start,
        end_byte=start + size_bytes,
        etag=etag,
        last_modified=draw(st.datetimes(timezones=st.just(UTC))),
        sha256=draw(st.binary(min_size=32, max_size=32)),
    )


AS_GIVEN = f"""
    SELECT file_path, version, version_id, start_byte, start_byte + size, etag, last_modified, sha256
    FROM loading, LATERAL (SELECT {READ}) AS read (version, part, version_id, etag, size)
    ORDER BY loading.ctid
"""


@pytest.mark.thorough
@settings(max_examples=200)
@given(rows=st.lists(st.lists(location_rows(), max_size=5), max_size=3))
def test_locations_of_any_text_are_in_the_table_as_they_were_in_their_batches(database, rows):
    given_batches = [pa.RecordBatch.from_pylist([asdict(row) for row in some], LOCATION_SCHEMA) for some in rows]
    expected = [row for some in rows for row in some]
    with database.transaction() as connection:
        connection.execute("CREATE TEMPORARY TABLE loading (LIKE locations) ON COMMIT DROP")
        count = copy_location_batches(connection, "loading", 7, 2**31 - 1, given_batches)
        loaded = connection.execute(AS_GIVEN).fetchall()
        same = connection.execute("SELECT DISTINCT source_id, caf_file_id, location_part(identity) FROM loading").fetchall()
        differing = connection.execute(
            f"SELECT count(*) FROM loading, LATERAL (SELECT {READ}) AS read (version, part, version_id, etag, size)"
            " WHERE location_identity(version, 0) <> identity"
            " OR location_content(version, 0, version_id, etag, size) IS DISTINCT FROM content"
        ).scalar_one()
    assert count == len(expected)
    assert [LocationRow(*one) for one in loaded] == expected
    assert set(same) <= {(7, 2**31 - 1, 0)}
    assert differing == 0


any_versions = hostile_text | object_versions()


@pytest.mark.thorough
@settings(max_examples=300)
@given(one=any_versions, other=any_versions, parts=st.tuples(*[st.sampled_from([0, 0, 1, 2, 100_001, -1])] * 2))
def test_identities_are_equal_where_version_and_part_are_and_give_them_back(connection, one, other, parts):
    query = "SELECT location_version(i), location_part(i), i FROM location_identity(%s::text, %s) AS i"
    found = [connection.execute(query, given).fetchone() for given in zip((one, other), parts, strict=True)]
    assert [row[:2] for row in found] == [(one, parts[0]), (other, parts[1])]
    assert (found[0][2] == found[1][2]) == ((one, parts[0]) == (other, parts[1]))
    if parts[0] == 0:
        assert location_identities(pa.array([one]))[0].as_py() == found[0][2]


# --- nothing is done twice -----------------------------------------------------------------------------------------------


INSERT = """
    INSERT INTO locations SELECT 0, now(), 1, 1, 'k', location_identity(%(version)s, %(part)s), '',
        location_content(%(version)s, %(part)s, %(version_id)s::text, %(etag)s, %(size)s)
"""


@pytest.mark.parametrize("other", [{"etag": "other"}, {"size": 5}, {"version_id": f"etag:{ETAG}:6000"}, {}])
@pytest.mark.parametrize("part", [0, 1])
def test_a_version_and_part_are_located_once_whatever_else_the_row_says(connection, other, part):
    row = {"version": f"etag:{ETAG}:6000", "part": part, "version_id": None, "etag": ETAG, "size": 6000}
    connection.execute(INSERT, row)
    with pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute(INSERT, row | other)
    for another in ({"part": 2}, {"version": f"etag:{ETAG}:6001"}, {"version": f"etag:{ETAG}-1:6000"}, {"version": "v"}):
        connection.execute(INSERT, row | another)
    assert connection.execute("SELECT count(*) FROM file_locations").fetchone() == (5,)


def test_a_key_that_is_located_twice_is_named_as_it_is(database):
    ledger, key = Ledger(database), "a, \\x01 (b)=(c)"
    (chunk,) = register(ledger, [key])
    bring_to(ledger, chunk, ChunkState.VERIFIED)
    with ledger.lease(f"chunk/{chunk}", holder()) as lease, pytest.raises(LedgerError) as refused:
        ledger.load_locations(lease, chunk, batches([location(key), location(key)]))
    assert str(refused.value) == f"'{key}' is located in another chunk already"


def test_a_version_id_that_is_not_the_object_version_is_refused(database, connection):
    lie = row_of(f"etag:{ETAG}:6000", 0, "v", ETAG, 6000)
    with pytest.raises(LedgerError, match="version_id"):
        list(location_batches(batches([lie])))
    with pytest.raises(psycopg.errors.CheckViolation, match="version_id_is_object_version"):
        connection.execute(INSERT, {"version": "w", "part": 0, "version_id": "v", "etag": ETAG, "size": 6000})


# --- plans ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_of(connection):
    """The plan of a query where tables are large: the planner may read none from its beginning."""

    def plan(query, **values):
        for other_way in ("seqscan", "bitmapscan", "hashjoin", "mergejoin"):
            connection.execute(f"SET enable_{other_way} = off")
        for name, value in values.items():
            query = query.replace(f"%({name})s", value)
        return "\n".join(line for (line,) in connection.execute(f"EXPLAIN {query}"))

    return plan


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(copy._CLAIMED_BUT_LOCATED, id="claimed, but located"),
        pytest.param(copy._HAS_STALE_ROWS, id="stale rows"),
        pytest.param("SELECT * FROM objects_in_parts WHERE source_id = 1", id="parts"),
        pytest.param(_PARTS.replace("%(source_id)s", "1"), id="parts exported"),
    ],
)
def test_one_object_version_is_found_in_the_index(plan_of, query):
    plan = plan_of(query, plan_id="1", good="'{located}'", caf_file_id="1", id="1")
    conditions = [after for before, after in pairwise(plan.splitlines()) if "using locations_pkey" in before]
    assert conditions
    assert all("Index Cond" in one and "(identity = CASE" in one for one in conditions)


def test_claims_of_what_is_restored_are_found_in_the_index(plan_of, connection):
    connection.execute("CREATE TEMPORARY TABLE restoring (LIKE locations)")
    plan = plan_of(import_chunk._CLAIMED)
    assert any("Index Cond" in line and "(object_version = (CASE" in line for line in plan.splitlines())


def test_a_page_of_keys_is_read_from_the_index_alone(plan_of):
    plan = plan_of(_KEYS.format(below="") % {"source": "'src'", "start": "'a'", "limit": 10})
    assert "Index Only Scan using locations_pkey on locations" in plan
