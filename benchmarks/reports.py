"""Benchmarks of inventories.

An S3 Inventory report is compared with DuckDB, which reads, sorts and writes the same files. A
listing is compared with rclone's.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from benchmarks import inputs
from benchmarks.case import CAF, Bench, ours, shell
from benchmarks.inputs import SEED
from benchmarks.inventories import key
from benchmarks.pairs import Command, best, run
from benchmarks.server import BUCKET, SOURCE_KEYS
from caf_pipeline_tests.support.inventory_reports import (
    SCHEMA,
    SUFFIXES,
    WRITERS,
    ReportWriter,
    Row,
)

FILES = 8
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)

# DuckDB needs the network to read ORC. pyarrow reads the files instead, as in caf.
READ_SORT_WRITE = """import sys, duckdb, pyarrow.orc
kind, out, *paths = sys.argv[1:]
if kind == "CSV":
    rows = duckdb.read_csv(paths, header=False)
elif kind == "ORC":
    tables = [pyarrow.orc.ORCFile(path).read() for path in paths]
    rows = duckdb.from_arrow(pyarrow.concat_tables(tables))
else:
    rows = duckdb.read_parquet(paths)
rows.order(rows.columns[1]).write_parquet(out)"""


def report(file_format: str, bench: Bench) -> Iterator[tuple[Command, Command]]:
    """Read an S3 Inventory report of 2,000,000 unsorted objects in eight files."""
    count = bench.pick(2_000_000, 100_000, 800)
    server = bench.s3()
    numbers = list(range(count))
    random.Random(SEED).shuffle(numbers)
    bodies = [
        WRITERS[file_format]([_row(number) for number in numbers[offset::FILES]], SCHEMA.names)
        for offset in range(FILES)
    ]
    paths = [bench.folder / f"{offset}.{SUFFIXES[file_format]}" for offset in range(FILES)]
    for path, body in zip(paths, bodies, strict=True):
        path.write_bytes(body)
    writer = ReportWriter(
        server.client(), BUCKET, BUCKET, file_format, folder_prefix=f"reports/{file_format}-{count}"
    )
    writer.write_files(bodies, MOMENT)
    our_output, their_output = bench.folder / "taken", bench.folder / "sorted.parquet"
    yield (
        ours(
            "report", server.endpoint, writer.folder, our_output, removed=[our_output, their_output]
        ),
        Command(
            [
                sys.executable,
                "-c",
                READ_SORT_WRITE,
                file_format,
                str(their_output),
                *map(str, paths),
            ],
            removed=[our_output, their_output],
        ),
    )


def _row(number: int) -> Row:
    return dict.fromkeys(SCHEMA.names) | {
        "bucket": BUCKET,
        "key": key(number),
        "is_latest": True,
        "is_delete_marker": False,
        "size": number * 7919 % 10_000_000,
        "last_modified_date": MOMENT,
        "e_tag": f"{number:032x}",
        "storage_class": "STANDARD",
        "is_multipart_uploaded": False,
        "replication_status": "",
        "encryption_status": "SSE-S3",
        "checksum_algorithm": "CRC64NVME",
    }


SETTINGS = """[sources.bench]
bucket = "{bucket}"
prefix = "{prefix}/"
endpoint_url = "{endpoint}"
listing_requests_per_second = 5000
listing_threads = {threads}
public = true

[store]
kind = "directory"
folder = "{folder}/store"
"""


# rclone uses the listed LastModified. By default it requests each object's headers, because its own
# copies store a time there.
LIST = 'rclone lsf -R --files-only --use-server-modtime --format pst "$1" > "$2"'


def listing(bench: Bench, count: int = 30_000) -> Iterator[tuple[Command, Command]]:
    """List objects, 1,000 in each folder.

    Putting the objects takes longer than listing them.
    """
    listed, names = _put_objects(bench, count), bench.folder / "names"
    scripts = [LIST] if not bench.round_trip_ms else [LIST, LIST.replace("-R", "-R --fast-list")]
    address, environment = f"bench:{BUCKET}/{listed.prefix}", bench.s3().rclone()
    yield (
        listed.plan_command(threads=8),
        best([shell(script, address, names, environment=environment) for script in scripts]),
    )


def listing_serially(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """List the same objects in concurrent ranges, or one page after the other."""
    listed = _put_objects(bench)
    yield listed.plan_command(threads=8), listed.plan_command(threads=1)


@dataclass(frozen=True)
class ListedPrefix:
    """A prefix of objects on the S3 server."""

    bench: Bench
    prefix: str

    def plan_command(self, *, threads: int) -> Command:
        """Return the command that lists the prefix by `threads` threads."""
        name = f"by-{threads}-at-{self.bench.round_trip_ms}ms"
        home = self.bench.folder / "listed"
        settings = self.bench.folder / f"listing-{name}.toml"
        endpoint = self.bench.s3().endpoint
        text = SETTINGS.format(
            bucket=BUCKET, prefix=self.prefix, endpoint=endpoint, folder=home, threads=threads
        )
        settings.write_text(text, encoding="utf-8")
        environment = {**SOURCE_KEYS, "CAF_CONFIG": str(settings), "CAF_HOME": str(home / "home")}
        command = Command([CAF, "plan", "bench", "--dry-run", "--json"], environment=environment)
        if not home.exists():
            run(command)  # creates the database
        return command


def _put_objects(bench: Bench, count: int = 30_000) -> ListedPrefix:
    count = bench.pick(count, 2_000, 20)
    bench.s3().fill(prefix := f"listed-{count}", inputs.fixed(count, 16))
    return ListedPrefix(bench, prefix)
