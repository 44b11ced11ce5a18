"""Other programs' archives: a cotar index made and asked, the metadata of a clp-s archive, a
ChunkIO log written and read.

`python -m benchmarks.formats`. The library is measured, in this process and on files that the
system has in memory; the median of some runs is told. The real clp-s, of the extra `logs`, makes
the archive; without it that part is left out.
"""

import argparse
import hashlib
import io
import json
import random
import statistics
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.inputs import KEPT
from caf_pipeline.errors import SettingsError
from caf_pipeline.formats.chunkio import LogEntry, LogReader, LogWriter
from caf_pipeline.formats.clps import FIRST_READ_BYTES, read_metadata
from caf_pipeline.formats.cotar import SUFFIX_BYTES, CotarIndex
from caf_pipeline.formats.cotar_builder import index_of
from caf_pipeline.formats.tar import TarFiles, files_of, walk
from caf_pipeline.retrieval.log_search import find_clp_s
from caf_pipeline.system.ranges import LocalFile

RUNS = 5
CONTENT_BYTES = 100_000  # of an entry of a log: the size for which the original's rates are known
SEED = 1


def measure(files: int, inputs: int, entries: int) -> dict[str, Any]:
    """Return seconds and rates.

    Args:
        files: of the tar that is indexed.
        inputs: of the clp-s archive whose metadata are read.
        entries: of the log that is written and read.
    """
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as name:
        folder = Path(name).resolve()
        told = {**_cotar(folder, files), **_chunkio(folder, entries)}
        try:
            told |= _clps(folder, inputs)
        except SettingsError as error:
            told["clps"] = str(error)
    return {**told, **report.about()}


def _median(work: Callable[[], Any]) -> float:
    took = []
    for _ in range(RUNS):
        begun = time.perf_counter()
        work()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def _cotar(folder: Path, count: int) -> dict[str, Any]:
    tar, names = (
        folder / "many.tar",
        [f"folder/{number % 100:02}/file-{number:08}.bin" for number in range(count)],
    )
    with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as archive:
        for file_name in names:
            member = tarfile.TarInfo(file_name)
            member.size = 100
            archive.addfile(member, io.BytesIO(file_name.encode().ljust(100)))
    source, size_bytes = LocalFile(tar), tar.stat().st_size

    def made() -> tuple[TarFiles, bytes]:
        found = files_of(walk(source.read, size_bytes))
        return found, index_of(found.files)

    seconds = _median(made)
    found, table = made()
    assert len(found.files) == count
    (path := folder / "many.tar.index").write_bytes(table)
    index_file = LocalFile(path)
    tail, index_bytes = index_file.read_suffix(SUFFIX_BYTES)
    index = CotarIndex.open_separate(index_file.read, tail, index_bytes, name=path.name)
    asked = [name.encode() for name in random.Random(SEED).choices(names, k=20_000)]
    took = _median(lambda: [index.find(name) for name in asked])
    assert all(index.find(name) for name in asked)
    index_file.close()
    source.close()
    return {
        "files": count,
        "index_seconds": round(seconds, 3),
        "look_ups_a_second": round(len(asked) / took),
    }


def _chunkio(folder: Path, count: int) -> dict[str, Any]:
    path, content = folder / "log", random.Random(SEED).randbytes(CONTENT_BYTES)

    def written() -> None:
        writer = LogWriter()
        with path.open("wb", buffering=0) as file:
            for number in range(count):
                file.write(writer.entry(number.to_bytes(16, "little"), content))

    write_seconds = _median(written)
    source = LocalFile(path)
    reader = LogReader(source.read, path.stat().st_size)

    def read() -> int:
        return sum(isinstance(one, LogEntry) for one in reader.check())

    assert read() == count
    read_seconds = _median(read)
    source.close()
    size_mb = count * CONTENT_BYTES / 1e6
    return {
        "log_mb": size_mb,
        "written_mb_a_second": round(size_mb / write_seconds),
        "read_mb_a_second": round(size_mb / read_seconds),
    }


def _clps(folder: Path, count: int) -> dict[str, Any]:
    program, logs, out = find_clp_s(), folder / "logs", folder / "archives"
    logs.mkdir()
    for number in range(count):
        line = {
            "timestamp": 1_700_000_000_000 + number,
            "text": hashlib.sha256(str(number).encode()).hexdigest(),
        }
        (logs / f"{number:08}.json").write_text(json.dumps(line) + "\n", encoding="utf-8")
    command = [
        str(program),
        "c",
        "--single-file-archive",
        "--timestamp-key",
        "timestamp",
        str(out),
        str(logs),
    ]
    subprocess.run(command, check=True, capture_output=True)
    [archive] = [one for one in out.rglob("*") if one.is_file()]
    source, size_bytes = LocalFile(archive), archive.stat().st_size

    def read() -> int:
        return len(
            read_metadata(
                source.read_prefix(FIRST_READ_BYTES)[0], size_bytes, source.read, name=archive.name
            ).inputs
        )

    assert read() == count
    seconds = _median(read)
    source.close()
    return {"clps_inputs": count, "clps_metadata_ms": round(1000 * seconds, 1)}


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats", description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--entries", type=int, default=5_000)
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.files, chosen.inputs, chosen.entries)))


if __name__ == "__main__":
    main()
