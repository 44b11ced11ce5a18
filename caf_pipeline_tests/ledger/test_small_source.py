"""A source with a hundredth of the rows reads no tenth of a table that has a row for each object.

Each statement of the ledger that names such a table is explained while it runs for that source.
"""

import importlib
import pkgutil
import re
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Executable, Insert, event

from caf_pipeline import ledger as ledger_package
from caf_pipeline.chunk_state import CLAIMING, GOOD, ChunkState
from caf_pipeline.ledger import claims, current_content, parts, sql_files
from caf_pipeline.ledger.engine import LedgerEngine, execute
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline_tests.support.ledger_rows import SOURCE, VERSION, archive, bring_to, register
from caf_pipeline_tests.support.postgres import connected

ROWS = {"big": 3_960, SOURCE: 40}
"""Rows of each of 25 chunks, by source."""

FILL = {
    "file_locations": """
        INSERT INTO file_locations (caf_file_id, start_byte, end_byte, size_bytes, last_modified,
            source_id, file_path, version_id, etag, sha256)
        SELECT caf_file_id, serial, serial + 10, 10, now(), source_id, to_char(serial, '000000'),
            '', '', sha256(serial::text::bytea)""",
    "claims": """
        INSERT INTO claims (source_id, file_path, version_id, etag, size_bytes, caf_file_id)
        SELECT source_id, to_char(serial, '000000'), '', '', 10, caf_file_id""",
}
VIEWS = ("objects_in_parts", "newer_claims", "look_up")

TEMPORARY_TABLES = (
    claims._CREATE_SKIPPING,
    claims._CREATE_RELEASING,
    current_content._CREATE_STATING,
    parts._CREATE_SPLITTING,
)
NOW = datetime.now(UTC)


def statements():
    """Yield each statement that reads or writes these tables, after its name."""
    for path in sorted(sql_files._QUERIES.iterdir()):
        yield path.stem, sql_files.query(path.stem)
    for module in pkgutil.iter_modules(ledger_package.__path__):
        contents = importlib.import_module(f"{ledger_package.__name__}.{module.name}")
        for name, value in vars(contents).items():
            if isinstance(value, Executable) and not isinstance(value, Insert):
                yield f"{module.name}.{name}", value


STATEMENTS = {
    name: statement
    for name, statement in statements()
    if any(table in str(statement) for table in (*FILL, *VIEWS))
}


@pytest.fixture(scope="module")
def filled(databases):
    """Return a database with both sources, and the statements' parameters for the small source."""
    with databases.taken() as database:
        ledger = Ledger(database)
        for number in range(25):
            for source, rows in ROWS.items():
                chunk = archive(ledger, [f"a{number}"], source=source)
                with connected(database) as connection:
                    for fill in FILL.values():
                        connection.execute(
                            f"{fill} FROM caf_files, generate_series(%s::int, %s) AS serial "
                            "WHERE name = %s",
                            (number * rows, number * rows + rows - 1, chunk),
                        )
        (sealed,) = register(ledger, ["b"])
        bring_to(ledger, sealed, ChunkState.SEALED)
        ledger.close()
        with connected(database) as connection:
            connection.execute("ANALYZE")
            located = connection.execute("SELECT * FROM caf_files WHERE name = %s", (chunk,)).one()
            plan = connection.execute(
                "SELECT plan_id FROM caf_files WHERE name = %s", (sealed,)
            ).scalar_one()
        yield database, values_of(located, plan)


def values_of(chunk, plan_id):
    """Return a value for each name of a parameter."""
    keys = ["a0", "a1"]
    return {
        **dict.fromkeys(("source", "name"), SOURCE),
        "sources": [SOURCE],
        **dict.fromkeys(("source_id", "of_source"), chunk.source_id),
        **dict.fromkeys(("id", "caf_file_id"), chunk.caf_file_id),
        **{name: [chunk.caf_file_id] for name in ("ids", "chunks", "all")},
        "chunk": chunk.name,
        "plan_id": plan_id,
        "good": GOOD,
        "claiming": sorted(CLAIMING),
        **dict.fromkeys(("key", "swapped"), keys[0]),
        "keys": keys,
        **dict.fromkeys(("version", "object_version"), VERSION),
        **dict.fromkeys(("versions", "with_times"), [VERSION] * 2),
        "times": [NOW] * 2,
        **dict.fromkeys(("have_ids", "are_latest"), [True] * 2),
        **dict.fromkeys(("as_of", "listed_at", "silent_from"), NOW),
        **dict.fromkeys(("start", "encoded_start"), ""),
        **dict.fromkeys(("end", "encoded_end", "until")),
        **dict.fromkeys(("limit", "most", "doublings", "written"), 16),
        "longest": timedelta(hours=1),
        **dict.fromkeys(("archive", "listing"), ""),
    }


def pages_read(node):
    """Return how many pages of each table and of its indexes a plan has read."""
    pages, inner = Counter(), node.get("Plans", ())
    hit_or_read = node["Shared Hit Blocks"] + node["Shared Read Blocks"]
    for child in inner:
        pages += pages_read(child)
        if not child["Node Type"].startswith("Bitmap"):
            hit_or_read -= child["Shared Hit Blocks"] + child["Shared Read Blocks"]
    if "Relation Name" in node:
        pages[node["Relation Name"]] += hit_or_read
    return pages


@pytest.fixture
def explain(filled):
    """Return how many pages of each table a statement reads, and how many pages each has."""
    database, values = filled
    engine = LedgerEngine(database)

    def run(statement, **others):
        with engine.begin() as connection:
            for create in TEMPORARY_TABLES:
                connection.exec_driver_sql(create)
            sizes = connection.exec_driver_sql("SELECT relname, relpages FROM pg_class").fetchall()

            @event.listens_for(connection, "before_cursor_execute", retval=True)
            def prefix(conn, cursor, text, parameters, *_):
                return f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {text}", parameters

            if isinstance(statement, str):
                names = re.findall(r"%\((\w+)\)s", statement)
            else:
                bound = statement.compile(connection).binds.values()
                names = [bind.key for bind in bound if bind.required]
            parameters = values | others
            result = execute(connection, statement, {name: parameters[name] for name in names})
            plan = result.cursor.fetchone()[0][0]["Plan"]
            connection.get_transaction().rollback()
        return pages_read(plan), dict(sizes)

    yield run
    engine.close()


@pytest.mark.thorough
@pytest.mark.parametrize("name", STATEMENTS)
def test_a_small_source_reads_little_of_each_table(explain, name):
    pages, sizes = explain(STATEMENTS[name])
    assert {table: pages[table] for table in FILL if pages[table] > sizes[table] / 10} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["export_located", "export_located_in_parts", "export_claimed"])
def test_a_window_of_a_large_source_reads_few_pages(explain, name):
    pages, _ = explain(STATEMENTS[name], source_id=1, start=" 050000", end=" 050009")
    assert all(pages[table] < 50 for table in FILL)
