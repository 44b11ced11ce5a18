"""Opens the Dagster UI, with the demo's S3 server and Jackal network beside it: what `make ui` runs.

While it runs, an object that is put into the bucket is archived by itself:

    aws --endpoint-url http://127.0.0.1:5055 s3 cp README.md s3://demo/      (any key and secret will do)
"""

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bucket
import network
import processes
import server

from caf_pipeline.defs.home import prepare_dagster_home
from caf_pipeline.defs.quiet import hush
from caf_pipeline.settings import load_settings

DG = Path(__file__).with_name("dg.py")


def main() -> int:
    """Run the UI until it is ended; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket", help="show this existing bucket, too")
    parser.add_argument("--port", default="3000", help="of the UI")
    arguments = parser.parse_args()
    if arguments.bucket:
        bucket.use(arguments.bucket)
    hush()
    with processes.ending_all(), nullcontext() if arguments.bucket else server.running(), network.running():
        if not arguments.bucket:
            os.environ.update(server.KEYS)
            server.client().create_bucket(Bucket=server.BUCKET)
        prepare_dagster_home(load_settings())
        print(f"http://127.0.0.1:{arguments.port}  (Ctrl-C ends it)", flush=True)
        try:
            return processes.run([sys.executable, str(DG), "dev", "--port", arguments.port])
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
