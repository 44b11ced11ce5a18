"""Starts a command and looks at the environment of everything that comes of it, daemons included,
for as long as any of it lives.

`python -m caf_pipeline_tests.support.started_processes REPORT MARKS COMMAND…` writes what it saw to
REPORT as JSON: of each process its command and which of MARKS, a JSON object of name and value, are
in its environment. It adopts orphans, so that nothing that is started can leave it; SIGTERM lets it
interrupt the command, and it fails where something lives on. Linux only.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 0.05
END_SECONDS = 120


@dataclass(frozen=True)
class Seen:
    """A process: its command's words in one line, and the names of the marks in its environment."""

    command: str
    marks: frozenset[str]


@dataclass(frozen=True)
class Started:
    """The command under way; `seen` says what was seen so far, `output` what it wrote."""

    process: "subprocess.Popen[bytes]"
    report: Path
    output: Path

    def wait(self, seconds: float) -> str:
        """Wait until it and all that came of it have ended; return what it wrote."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired as late:
            living = [
                " ".join(item.cmdline())
                for item in psutil.Process(self.process.pid).children(recursive=True)
            ]
            raise AssertionError(
                f"still running: {living}, having said: {self.output.read_text()}"
            ) from late
        return self.output.read_text()

    @property
    def seen(self) -> list[Seen]:
        if not self.report.exists():
            return []
        return [
            Seen(command, frozenset(marks))
            for command, marks in json.loads(self.report.read_text())
        ]


@contextmanager
def started(
    command: list[str], marks: Mapping[str, str], *, folder: Path, environment: Mapping[str, str]
) -> Iterator[Started]:
    """Start a command; at the end it is interrupted where it runs, and everything that came of it
    has ended.
    """
    report = folder / "processes.json"
    words = [
        sys.executable,
        "-m",
        "caf_pipeline_tests.support.started_processes",
        str(report),
        json.dumps(marks),
        *command,
    ]
    path = folder / "output.txt"
    with path.open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield Started(process, report, path)
    finally:
        process.terminate()
        assert process.wait(2 * END_SECONDS) == 0, path.read_text()


def look(process: psutil.Process, marks: Mapping[str, bytes]) -> tuple[str, tuple[str, ...]] | None:
    """Return a process's command and the marks in its environment; None where it has none, or is
    just becoming another.
    """
    # Between fork and exec a child shows its parent's environment, and its parent's command as
    # well.
    command = process.cmdline()
    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    if not command or command != process.cmdline():
        return None
    return " ".join(command), tuple(name for name, value in marks.items() if value in environment)


def main() -> int:
    report, marks, *command = sys.argv[1:]
    values = {name: value.encode() for name, value in json.loads(marks).items()}
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    requests = []
    signal.signal(signal.SIGTERM, lambda *_: requests.append(time.monotonic()))
    child = subprocess.Popen(command, start_new_session=True)
    state: set[tuple[str, tuple[str, ...]]] = set()
    ourselves = psutil.Process()
    reports = False
    late: set[str] = set()
    while living := ourselves.children(recursive=True):
        for process in living:
            with suppress(psutil.Error, OSError):
                result = look(process, values)
                if result and result not in state:
                    state.add(result)
                    Path(f"{report}.new").write_text(json.dumps(sorted(state)))
                    os.replace(f"{report}.new", report)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if requests and not reports:
            reports = True
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)
        if requests and time.monotonic() > requests[0] + END_SECONDS:
            for process in living:
                with suppress(psutil.Error):
                    late.add(" ".join(process.cmdline()))
                    process.kill()
        time.sleep(LOOK_SECONDS)
    if late:
        print(f"interrupted, these lived on for {END_SECONDS} s: {sorted(late)}", flush=True)
    return len(late)


if __name__ == "__main__":
    sys.exit(main())
