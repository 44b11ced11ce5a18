"""Chunks as the ledger has them, made up: for tests of what only reads them."""

from datetime import UTC, datetime
from typing import Any

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.ledger.records import Chunk


def a_chunk(name: str = "demo-00000000-00001", **changes: Any) -> Chunk:
    """Return a located chunk of 1,000 stored bytes, posted in block 7; `changes` replaces fields."""
    fields: dict[str, Any] = {
        "caf_file_id": 1,
        "name": name,
        "source": "demo",
        "archive_id": "a",
        "plan": "00000000",
        "plan_folder": "/nowhere",
        "number": 1,
        "state": ChunkState.LOCATED,
        "epoch": 1,
        "attempts": 1,
        "object_count": 1,
        "object_bytes": 900,
        "expected_size_bytes": 1_100,
        "caf_size_bytes": 1_000,
        "stored_size_bytes": 1_000,
        "member_count": 1,
        "member_bytes": 900,
        "skipped_count": 0,
        "released_count": 0,
        "merkle_root": b"r" * 32,
        "proof_type": 3,
        "owner": "jkl1owner",
        "start": 7,
        "samples": (),
        "reason": "",
        "updated_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    return Chunk(**fields | changes)
