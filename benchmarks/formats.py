"""Measure the archive formats of other programs: cotar indexes, clp-s archives and ChunkIO logs.

`python -m benchmarks.formats` measures the library in its own process, with the files in the page
cache. Each figure is the median of several runs. The extra `logs` installs clp-s. If it is missing,
its part is skipped.
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
CONTENT_BYTES = 100_000  # of a log entry: the rates of the original program are known for it
SEED = 1


def measure(files: int, inputs: int, entries: int) -> dict[str, Any]:
    """Measure all formats.

    Args:
        files: Number of files in the tar that is indexed.
        inputs: Number of inputs of the clp-s archive whose metadata is read.
        entries: Number of entries of the log that is written and read.
    """
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as name:
        folder = Path(name).resolve()
        results = {**_cotar(folder, files), **_chunkio(folder, entries)}
        try:
            results |= _clps(folder, inputs)
        except SettingsError as error:
            results["clps"] = str(error)
    return {**results, **report.about()}


def _median(work: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


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

    def build_index() -> tuple[TarFiles, bytes]:
        tar_files = files_of(walk(source.read, size_bytes))
        return tar_files, index_of(tar_files.files)

    index_seconds = _median(build_index)
    tar_files, table = build_index()
    assert len(tar_files.files) == count
    (path := folder / "many.tar.index").write_bytes(table)
    index_file = LocalFile(path)
    tail, index_bytes = index_file.read_suffix(SUFFIX_BYTES)
    index = CotarIndex.open_separate(index_file.read, tail, index_bytes, name=path.name)
    looked_up = [name.encode() for name in random.Random(SEED).choices(names, k=20_000)]
    look_up_seconds = _median(lambda: [index.find(name) for name in looked_up])
    assert all(index.find(name) for name in looked_up)
    index_file.close()
    source.close()
    return {
        "files": count,
        "index_seconds": round(index_seconds, 3),
        "look_ups_a_second": round(len(looked_up) / look_up_seconds),
    }


def _chunkio(folder: Path, count: int) -> dict[str, Any]:
    path, content = folder / "log", random.Random(SEED).randbytes(CONTENT_BYTES)

    def write() -> None:
        writer = LogWriter()
        with path.open("wb", buffering=0) as file:
            for number in range(count):
                file.write(writer.entry(number.to_bytes(16, "little"), content))

    write_seconds = _median(write)
    source = LocalFile(path)
    reader = LogReader(source.read, path.stat().st_size)

    def read() -> int:
        return sum(isinstance(item, LogEntry) for item in reader.check())

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
    [archive] = [path for path in out.rglob("*") if path.is_file()]
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
    """Print the results as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats", description=__doc__)
    parser.add_argument("--files", type=int, default=100_000, help="files of the tar")
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs of clp-s")
    parser.add_argument("--entries", type=int, default=5_000, help="entries of the log")
    options = parser.parse_args()
    print(json.dumps(measure(options.files, options.inputs, options.entries)))


if __name__ == "__main__":
    main()
