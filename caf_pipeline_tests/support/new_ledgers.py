"""Ledgers in databases of their own: any number for a test, e.g. a lost and a rebuilt ledger.

`rows_of` compares their rows without ids, times and folders of plans.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline_tests.support.postgres import Databases, connected

TABLES = {
    "sources": "SELECT name, archive_id, address FROM sources ORDER BY name",
    "plans": "SELECT sources.name AS source, plans.name, sha256, snapshot, object_count, "
    "object_bytes"
    " FROM plans JOIN sources USING (source_id) ORDER BY 1, 2",
    "chunks": "SELECT chunks.name, sources.name AS source, plans.name AS plan, number, state, "
    "chunks.reason,"
    " chunks.object_count, chunks.object_bytes, caf_size_bytes, stored_size_bytes, member_count, "
    "member_bytes,"
    " skipped_count, released_count, merkle_root, proof_type, owner, start, samples"
    " FROM chunks JOIN sources USING (source_id) JOIN plans USING (plan_id) ORDER BY 1",
    "replicas": "SELECT name, provider, proof, listed, fault FROM replicas JOIN caf_files USING "
    "(caf_file_id) ORDER BY 1, 2",
    "file_locations": "SELECT sources.name AS source, file_path, version_id, etag, size_bytes, "
    "rewritten_at::text, part,"
    " caf_files.name AS chunk, start_byte, end_byte, last_modified, sha256, header_set FROM "
    "file_locations"
    " JOIN caf_files USING (caf_file_id)"
    " JOIN sources ON sources.source_id = file_locations.source_id ORDER BY 1, 2, 3, 4, 5, 6, 7",
    "header_sets": "SELECT * FROM header_sets WHERE header_set IN (SELECT header_set FROM "
    "file_locations) ORDER BY 1",
    "skipped_objects": "SELECT sources.name AS source, file_path, version_id, etag, size_bytes, "
    "rewritten_at::text,"
    " skipped_objects.reason, detail, caf_files.name AS chunk, retry_at = 'infinity' AS for_ever"
    " FROM skipped_objects LEFT JOIN caf_files USING (caf_file_id)"
    " JOIN sources ON sources.source_id = skipped_objects.source_id ORDER BY 1, 2, 3, 4, 5, 6",
    "object_parts": "SELECT caf_files.name, sources.name AS source, file_path, version_id, etag, "
    "object_parts.object_bytes,"
    " rewritten_at::text, part, part_count, start_byte, end_byte, location_part, abandoned"
    " FROM object_parts JOIN caf_files USING (caf_file_id)"
    " JOIN sources ON sources.source_id = object_parts.source_id ORDER BY 1",
    "log_times": "SELECT name, log_times.start_byte, first_ms, last_ms, has_log_times, file_path "
    "FROM log_times"
    " JOIN caf_files USING (caf_file_id) LEFT JOIN file_locations USING (caf_file_id, start_byte) "
    "ORDER BY file_path",
    "claims": "SELECT file_path, version_id, etag, size_bytes, rewritten_at::text FROM claims "
    "ORDER BY 1, 2, 3, 4, 5",
}

NewLedger = Callable[[], Ledger]


def make_ledger(stack: ExitStack, databases: Databases) -> Ledger:
    """Return an empty ledger, at `ledger.url`, in its own database until the stack ends."""
    database = stack.enter_context(databases.taken())
    ledger = Ledger(database)
    ledger.url = database.url
    return ledger


@pytest.fixture
def new_ledger(databases: Databases) -> Iterator[NewLedger]:
    """Returns a new empty ledger at each call."""
    with ExitStack() as stack:
        yield lambda: make_ledger(stack, databases)


def rows_of(ledger: Ledger) -> dict[str, list[dict[str, Any]]]:
    """Return the ledger's rows by table, in a fixed order."""
    with connected(ledger.database) as connection:
        found = {
            name: connection.execute(statement).fetchall() for name, statement in TABLES.items()
        }
    return {name: [row._asdict() for row in rows] for name, rows in found.items()}
