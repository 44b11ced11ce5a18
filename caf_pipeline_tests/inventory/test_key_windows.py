"""Windows of keys."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from caf_pipeline.errors import IntegrityError
from caf_pipeline.inventory import key_windows as key_windows_module
from caf_pipeline.inventory.key_windows import key_windows
from caf_pipeline.inventory.keyed_rows import KeyedRows
from caf_pipeline.inventory.snapshot import SnapshotWriter
from caf_pipeline_tests.support.snapshots import MOMENT, thing, use_small_windows


@pytest.mark.parametrize(
    ("after", "until", "expected"),
    [
        (b"", b"03", [(None, b"03")]),
        (b"02", None, [(b"02", b"06"), (b"06", b"10"), (b"10", None)]),
        (b"02", b"09", [(b"02", b"06"), (b"06", b"09")]),
        (b"02", b"06", [(b"02", b"06")]),
        (b"50", b"60", [(b"50", b"60")]),
    ],
)
def test_windows_cover_exactly_the_snapshots_keys(tmp_path, monkeypatch, after, until, expected):
    use_small_windows(monkeypatch)
    keys = [
        key
        for key in (b"%02d" % number for number in range(13))
        if key > after and (until is None or key <= until)
    ]
    path = tmp_path / "s.parquet"
    with SnapshotWriter(path, source="src", listed_at=MOMENT, after=after, until=until) as writer:
        for key in keys:
            writer.add([thing(key)])
        snapshot = writer.finish()
    assert list(key_windows(path, snapshot.keys)) == expected


def test_a_file_whose_rows_lost_their_keys_is_damaged(tmp_path):
    """A flipped bit in the file's footer has this effect."""
    pq.write_table(pa.table({"key": pa.nulls(3, pa.binary())}), tmp_path / "s.parquet")
    with pytest.raises(IntegrityError, match=r"s\.parquet"):
        KeyedRows(tmp_path / "s.parquet", ["key"])


def test_windows_need_no_statistics(tmp_path, monkeypatch):
    monkeypatch.setattr(key_windows_module, "WINDOW_ROWS", 1)
    keys = pa.table({"key": pa.array([b"a", b"b"], pa.binary())})
    pq.write_table(keys, tmp_path / "s.parquet", write_statistics=False)
    assert list(key_windows(tmp_path / "s.parquet")) == [(None, b"b"), (b"b", None)]
