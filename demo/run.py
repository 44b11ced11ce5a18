"""Archives real files through Dagster, and fetches some of them back: `make demo`.

python demo/run.py                      archives this machine's own Python files.
python demo/run.py --folder DIR         archives the files of a folder.
python demo/run.py --bucket NAME        archives an existing bucket with the environment's AWS keys.
python demo/run.py --inventory FORMAT   reads an S3 Inventory report: CSV, ORC or Parquet.

If --bucket is set, FORMAT is the folder of its reports, such as s3://reports/daily/.
"""

import argparse
import filecmp
import random
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bucket
import identity
import network
import reports
import server
from rich.console import Console

from caf_pipeline.caf.merkle import IMPLEMENTATION
from caf_pipeline.system.child_environment import Need, child_environment

CAF = str(Path(sys.executable).with_name("caf"))
COMPARED = 5  # besides the largest file and an empty one


def main() -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--folder", type=Path, help="archive the files of this folder")
    origin.add_argument("--bucket", help="archive this existing bucket")
    parser.add_argument(
        "--inventory", metavar="FORMAT", help="use an S3 Inventory report instead of a listing"
    )
    arguments = parser.parse_args()
    console = Console(stderr=True)
    started = time.monotonic()
    if arguments.folder and not arguments.folder.is_dir():
        parser.error(f"{arguments.folder} is not a folder")
    if arguments.inventory and not arguments.bucket and arguments.inventory not in reports.FORMATS:
        parser.error(f"--inventory must be one of {', '.join(reports.FORMATS)}")
    if not arguments.bucket:
        server.runs()
    network.runs()  # ends the demo if a port is taken, before it starts anything
    files = (
        []
        if arguments.bucket
        else server.show(arguments.folder.resolve() if arguments.folder else None)
    )
    identity.use(network.SETTINGS)
    console.print(f"Merkle roots are computed in {IMPLEMENTATION} code")
    with nullcontext() if arguments.bucket else server.running(), network.running():
        network.buy_space()
        if arguments.bucket:
            source = bucket.use(arguments.bucket, arguments.inventory or "")
            keys = child_environment(Need.S3)
        else:
            source, keys = "demo", server.KEYS
            server.fill(files, console)
            if arguments.inventory:
                reports.write(arguments.inventory, console)
        environment = network.environment()
        status = subprocess.run(
            [CAF, "run", "--source", source], env=environment | keys, check=False
        ).returncode
        if status == 0:
            status = compare(source, files, console) if files else 0
        subprocess.run([CAF, "status"], env=environment, check=False)
    seconds = time.monotonic() - started
    if status:
        console.print(f"{seconds:.0f} s; the demo failed, see above")
    else:
        console.print(
            f"{seconds:.0f} s; 'make ui' opens the Dagster UI, and 'make demo' archives new files"
        )
    return status


def compare(source: str, files: list[tuple[Path, str]], console: Console) -> int:
    """Fetch some files and compare them byte for byte with those on disk."""
    by_size = sorted(files, key=lambda file: file[0].stat().st_size)
    chosen = {by_size[0], by_size[-1], *random.sample(files, min(COMPARED, len(files)))}
    with tempfile.TemporaryDirectory() as folder:
        fetched = Path(folder, "fetched")
        for path, key in sorted(chosen):
            if subprocess.run(
                [CAF, "get", source, key, "-o", str(fetched)],
                env=network.environment(),
                check=False,
            ).returncode:
                return 1
            if not filecmp.cmp(path, fetched, shallow=False):
                console.print(f"differs: {key}", soft_wrap=True)
                return 1
            console.print(f"identical: {key} ({path.stat().st_size:,} bytes)", soft_wrap=True)
            fetched.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
