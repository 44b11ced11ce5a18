"""The text form of a chunk's id."""

import pytest

from caf_pipeline.errors import UsageError
from caf_pipeline.inventory.chunk_id import ChunkId


@pytest.mark.parametrize(
    "chunk_id",
    [
        ChunkId("demo", "1a2b3c4d", 1),
        ChunkId("a-b-00000001-2", "0" * 12, 99_999),
        ChunkId("0", "deadbeef", 0),
    ],
)
def test_an_id_is_read_as_it_is_written(chunk_id):
    assert ChunkId.parse(str(chunk_id)) == chunk_id


@pytest.mark.parametrize(
    "text",
    [
        "",
        "demo",
        "demo-1a2b3c4d",
        "demo-1a2b3c4d-0001",
        "demo-1a2b3c4d-000001",
        "demo-1A2B3C4D-00001",
        "demo-1a2b3c4d5-00001",
        "-1a2b3c4d-00001\n",
        "Demo-1a2b3c4d-00001",
        "demo-1a2b3c4d-٠٠٠٠١",
    ],
)
def test_an_invalid_id_parses_as_none(text):
    assert ChunkId.parse(text) is None


def test_an_invalid_partition_is_refused_by_name():
    from caf_pipeline.naming import source_of

    assert source_of("a-b-1a2b3c4d-00001") == "a-b"
    with pytest.raises(UsageError, match="'2024-01-01'"):
        source_of("2024-01-01")
