"""Archives that clp-s packs from records."""

import json
import subprocess
from pathlib import Path

from caf_pipeline.retrieval.log_search import find_clp_s


def packed(folder: Path, records: list[dict], *options: str) -> bytes:
    """Return the single-file archive that clp-s makes of records, in a new folder."""
    folder.mkdir()
    lines = folder / "it.jsonl"
    lines.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    subprocess.run(
        [find_clp_s(), "c", "--single-file-archive", *options, folder / "out", lines],
        check=True,
        capture_output=True,
    )
    (archive,) = (folder / "out").iterdir()
    return archive.read_bytes()
