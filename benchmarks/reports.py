"""Inventories: S3's reports beside DuckDB, which reads, sorts and writes the same files; listings
beside rclone's.
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
from benchmarks.pairs import Command, run
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

# DuckDB reads no ORC without the network: pyarrow reads the files for it, as it does for us.
READ_SORT_WRITE = """import sys, duckdb, pyarrow.orc
kind, out, *paths = sys.argv[1:]
if kind == "CSV":
    found = duckdb.read_csv(paths, header=False)
elif kind == "ORC":
    found = duckdb.from_arrow(pyarrow.concat_tables(pyarrow.orc.ORCFile(path).read() for path in paths))
else:
    found = duckdb.read_parquet(paths)
found.order(found.columns[1]).write_parquet(out)"""  # noqa: E501


def report(file_format: str, bench: Bench) -> Iterator[tuple[Command, Command]]:
    """A report of 2,000,000 objects in eight files, in no order."""
    count = bench.pick(2_000_000, 100_000, 800)
    server = bench.s3()
    numbers = list(range(count))
    random.Random(SEED).shuffle(numbers)
    bodies = [
        WRITERS[file_format]([_row(number) for number in numbers[at::FILES]], SCHEMA.names)
        for at in range(FILES)
    ]
    paths = [bench.folder / f"{at}.{SUFFIXES[file_format]}" for at in range(FILES)]
    for path, body in zip(paths, bodies, strict=True):
        path.write_bytes(body)
    writer = ReportWriter(
        server.client(), BUCKET, BUCKET, file_format, folder_prefix=f"reports/{file_format}-{count}"
    )
    writer.write_files(bodies, MOMENT)
    one, other = bench.folder / "taken", bench.folder / "sorted.parquet"
    yield (
        ours("report", server.endpoint, writer.folder, one, removed=[one, other]),
        Command(
            [sys.executable, "-c", READ_SORT_WRITE, file_format, str(other), *map(str, paths)],
            removed=[one, other],
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

[store]
kind = "directory"
folder = "{folder}/store"
"""


# LastModified as listed: else rclone asks for each object's headers, where its own copies note a
# time.
LIST = 'rclone lsf -R --files-only --use-server-modtime --format pst "$1" > "$2"'


def listing(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """30,000 objects, a thousand in each folder; to put them takes longer than to list them."""
    listed, names = _listed(bench), bench.folder / "names"
    yield (
        listed.planned(threads=8),
        shell(LIST, f"bench:{BUCKET}/{listed.prefix}", names, environment=bench.s3().rclone()),
    )


def listing_serially(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """The same objects, listed in ranges side by side, or page after page."""
    listed = _listed(bench)
    yield listed.planned(threads=8), listed.planned(threads=1)


@dataclass(frozen=True)
class Listed:
    """A prefix of objects on the S3 server."""

    bench: Bench
    prefix: str

    def planned(self, *, threads: int) -> Command:
        """Return the command that lists it by so many threads, in a home of its own, which is
        made.
        """
        home = self.bench.folder / f"listed-by-{threads}"
        settings = self.bench.folder / f"listing-by-{threads}.toml"
        endpoint = self.bench.s3().endpoint
        text = SETTINGS.format(
            bucket=BUCKET, prefix=self.prefix, endpoint=endpoint, folder=home, threads=threads
        )
        settings.write_text(text, encoding="utf-8")
        environment = {**SOURCE_KEYS, "CAF_CONFIG": str(settings), "CAF_HOME": str(home / "home")}
        plan = Command([CAF, "plan", "bench", "--dry-run", "--json"], environment=environment)
        run(plan)  # makes the database
        return plan


def _listed(bench: Bench) -> Listed:
    count = bench.pick(30_000, 2_000, 20)
    bench.s3().fill(prefix := f"listed-{count}", inputs.fixed(count, 16))
    return Listed(bench, prefix)
