"""Memory of uploads and downloads does not depend on their size."""

import json
import os
import subprocess
import sys

from caf_pipeline_tests.support.jackal_stores import open_store

MIB = 1 << 20
SIZE = 300 * MIB
LIMIT = 200 * MIB

SCRIPT = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from caf_pipeline.store.protocol import PostRecord
from caf_pipeline_tests.support.jackal_stores import open_store
from caf_pipeline_tests.support.peak_memory import peak_bytes

lcd, chain_id, root, owner, start, path = sys.argv[1:]
opened = open_store(SimpleNamespace(lcds=[lcd], chain_id=chain_id), copies=2)
before = peak_bytes()
posting = PostRecord(bytes.fromhex(root), owner, int(start), Path(path).stat().st_size)
opened.store.put(posting, Path(path), lambda sent: None)
uploaded = peak_bytes() - before
read = sum(len(piece) for piece in opened.store.read(posting, 0, posting.stored_size_bytes))
opened.store.close()
print(json.dumps({"uploaded": uploaded, "read": read, "peak": peak_bytes() - before}))
"""


def test_an_upload_and_a_download_stay_under_200_mebibytes(network, tmp_path):
    path = tmp_path / "chunk.caf"
    with path.open("wb") as file:
        for _ in range(SIZE // MIB):
            file.write(os.urandom(MIB))
    opened = open_store(network, copies=2)
    posting = opened.posted(path)
    opened.store.close()
    arguments = [
        network.lcd,
        network.chain_id,
        posting.merkle_root.hex(),
        posting.owner,
        str(posting.start),
        str(path),
    ]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True
    )
    output = json.loads(run.stdout)
    assert output["read"] == SIZE
    assert output["peak"] < LIMIT
