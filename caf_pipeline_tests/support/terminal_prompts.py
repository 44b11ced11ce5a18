"""Runs commands that ask on their terminal."""

import contextlib
import fcntl
import os
import pty
import select
import subprocess
import termios
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from caf_pipeline_tests.support.patience import PATIENCE_SECONDS


def run_on_terminal(
    command: Sequence[str | Path],
    answers: Iterable[str],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> bytes:
    """Answer each prompt for a passphrase or a yes, and return the standard output."""
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - a system call
    ) as process:
        os.close(terminal)
        remaining, shown = iter(answers), b""
        with contextlib.suppress(OSError):  # the process closed its terminal
            while select.select([controller], [], [], PATIENCE_SECONDS)[0]:
                shown += os.read(controller, 1000)
                # A question's last space goes to the standard output. That of a passphrase's
                # prompt comes when the input before it is already discarded.
                if shown.endswith((b": ", b"]:")) and (answer := next(remaining, None)) is not None:
                    os.write(controller, answer.encode() + b"\n")
                    shown = b""
        os.close(controller)
        try:
            out, _ = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, shown
    return out
