"""CAF files, manifests and journals that were tampered with: read correctly, or refused.

Each attempt stays within 256 MiB and ends. The inputs are mutations of real files. `caf_fuzzing`
tries them in processes with limited memory and time.
"""

import json
import os
import signal
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from caf_pipeline_tests.support import caf_fuzzing
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS

USUAL = {"archive": 3000, "manifest": 2000, "journal": 1500}
SOAK = {"archive": 700_000, "manifest": 200_000, "journal": 100_000}
BATCH = {"usual": 1500, "soak": 20_000}
BATCH_SECONDS = {"usual": PATIENCE_SECONDS, "soak": 3000}
WORDS = {
    "archive": "CAF files, mutated",
    "manifest": "manifests, mutated",
    "journal": "journals, mutated",
}


@dataclass(frozen=True)
class Ended:
    """How a batch ended: its output, its status, and the number of its last input."""

    output: str
    status: int
    number: int


def batch(kind, first, count, seconds, folder) -> Ended:
    progress = folder / f"{kind}-{first}"
    command = [
        sys.executable,
        "-m",
        "caf_pipeline_tests.support.caf_fuzzing",
        kind,
        str(first),
        str(count),
        str(progress),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    at = progress.read_bytes() if progress.exists() else b""
    return Ended(
        output.decode(errors="replace"),
        process.returncode,
        struct.unpack("<Q", at)[0] if len(at) == 8 else -1,
    )


def explained(kind, ended: Ended) -> str:
    """Return the failure with its input, so that it can be repeated."""
    if ended.status in (0, caf_fuzzing.WRONG_STATUS):
        return ended.output
    how = signal.Signals(-ended.status).name if ended.status < 0 else f"status {ended.status}"
    again = f"python -m caf_pipeline_tests.support.caf_fuzzing {kind} {ended.number} 1"
    return f"{kind} {ended.number} ended the process by {how}; `{again}` repeats it\n{ended.output}"


@pytest.mark.parametrize("kind", caf_fuzzing.KINDS)
def test_mutated_files_never_crash_hang_or_fill_memory(kind, fault, soak, tmp_path):
    form, total = ("soak", SOAK[kind]) if soak else ("usual", USUAL[kind])
    size = BATCH[form]
    with (
        fault("Hostile input", WORDS[kind]) as case,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        case.tried = total
        runs = [
            pool.submit(batch, kind, at, min(size, total - at), BATCH_SECONDS[form], tmp_path)
            for at in range(0, total, size)
        ]
        ended = [run.result() for run in runs]
        bad = [explained(kind, batch) for batch in ended if batch.status]
        assert not bad, "\n".join(bad)


@pytest.mark.parametrize("kind", caf_fuzzing.KINDS)
def test_the_real_files_that_inputs_are_made_of_are_read(kind):
    """Otherwise every mutation would be refused for a fault of its original."""
    seeds = {
        "archive": caf_fuzzing.archives,
        "manifest": caf_fuzzing.manifests,
        "journal": caf_fuzzing.journals,
    }[kind]()
    assert len(seeds) >= 4
    for seed in seeds:
        caf_fuzzing.KINDS[kind][1](seed)


@pytest.mark.parametrize(
    ("how", "sign"),
    [
        ("raise ValueError('found out')", "found out"),
        ("os.abort()", "SIGABRT"),
        ("bytearray(1 << 30)", "MemoryError"),
    ],
)
def test_failure_in_a_worker_reports_its_input(how, sign, tmp_path):
    """The fuzzer reports an error, a crash and an excessive allocation with the input's number."""
    code = (
        "import os, sys, pathlib\nfrom caf_pipeline_tests.support import caf_fuzzing as f\nmake = "
        "f.KINDS['archive'][0]\n"
        f"seven = make(7)\ndef attempt(content):\n    if content == seven:\n        {how}\n"
        "f.KINDS['archive'] = make, attempt\nf.try_commands = lambda content: None\n"
        f"sys.exit(3 if f.run('archive', range(20), pathlib.Path({str(tmp_path / 'at')!r})) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    number = struct.unpack("<Q", (tmp_path / "at").read_bytes())[0]
    failure = explained("archive", Ended(done.stdout, done.returncode, number))
    assert done.returncode
    assert sign in failure
    assert "archive 7 " in failure or json.loads(done.stdout.splitlines()[0])["number"] == 7
