"""Runs `caf` in a folder with a caf.toml; returns output and exit status.

Commands run in this process, which takes a tenth of the time of a new one. Tests of the process
itself (signals, kills, memory, children) use `process` and `start`.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Final
from unittest import mock

import pytest
from dagster import RetryPolicy

from caf_pipeline.cli import main
from caf_pipeline.cli.opening import opened_ledger
from caf_pipeline.defs import source_s3
from caf_pipeline.ledger import embedded
from caf_pipeline.ledger.embedded import PLACE_VARIABLE
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import load_settings
from caf_pipeline.wiring import open_run_context
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.run_contexts import archive_everything

CAF = os.environ.get("CAF_UNDER_TEST") or str(Path(sys.executable).with_name("caf"))
"""The installed command. `make wheel` names the command of another environment."""

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "hush-hush",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
"""The test server's keys. No output may have the secret."""

FOLDER_STORE = {"CAF_STORE__KIND": "directory"}
FOREIGN = ("AWS_", "CAF_", "DAGSTER_", "JACKAL_")
"""Prefixes of a developer's own settings, which no test may see."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM)


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    status: int
    out: bytes
    err: str


@dataclass(frozen=True)
class CommandLine:
    """A folder to work in, and environment variables.

    By default chunks are kept in a folder.
    """

    folder: Path
    environment: dict[str, str]

    def settings(self, text: str) -> None:
        (self.folder / "caf.toml").write_text(text, encoding="utf-8")

    def __call__(self, *arguments: str, **more: str) -> Done:
        """Run a command in this process."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            with self.surroundings(**more), _in_time(arguments), _written_to(out, err):
                try:
                    status = main(list(arguments))
                except Exception:  # noqa: BLE001 - as the interpreter does with CAF_TRACEBACK
                    traceback.print_exc()
                    status = 1
            return Done(status, _all_of(out), _all_of(err).decode())

    def process(self, *arguments: str, **more: str) -> Done:
        """Run the installed command as a process."""
        process = self.start(*arguments, **more)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        return Done(process.returncode, out, err.decode())

    def start(self, *arguments: str, **more: str) -> "subprocess.Popen[bytes]":
        """Start the installed command as a process."""
        return subprocess.Popen(
            [CAF, *arguments],
            cwd=self.folder,
            env=self.variables(more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    @contextlib.contextmanager
    def surroundings(self, **more: str) -> Iterator[None]:
        """Work in the folder with these variables; then undo what a command changed."""
        servers = set(embedded._opened)
        handlers = [(number, signal.getsignal(number)) for number in _SIGNALS]
        loggers = [
            logging.root,
            *(
                logger
                for logger in logging.root.manager.loggerDict.values()
                if isinstance(logger, logging.Logger)
            ),
        ]
        logged = [
            (
                logger,
                logger.level,
                logger.propagate,
                logger.disabled,
                list(logger.handlers),
                list(logger.filters),
            )
            for logger in loggers
        ]
        source_s3._client.cache_clear()  # it has the keys of another environment
        try:
            with (
                mock.patch.dict(os.environ, self.variables(more), clear=True),
                # A step would wait 14 s before a retry.
                mock.patch.object(RetryPolicy, "calculate_delay", return_value=0.0),
                contextlib.chdir(self.folder),
                warnings.catch_warnings(),
            ):
                signal.signal(signal.SIGINT, signal.default_int_handler)
                yield
        finally:
            for number, handler in handlers:
                signal.signal(number, handler)
            for logger, level, propagate, disabled, to, filters in logged:
                logger.level, logger.propagate, logger.disabled, logger.handlers, logger.filters = (
                    level, propagate, disabled, to, filters,
                )  # fmt: skip
            logging.root.manager._clear_cache()
            source_s3._client.cache_clear()
            for folder in set(embedded._opened) - servers:  # as at the end of a process
                embedded._opened[folder].close()

    def variables(self, more: dict[str, str] | None = None) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == PLACE_VARIABLE or not name.startswith(FOREIGN)
        }
        return kept | FOLDER_STORE | self.environment | (more or {})


@contextlib.contextmanager
def _in_time(arguments: tuple[str, ...]) -> Iterator[None]:
    """Fail the test if the command hangs."""

    def fail(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"caf {' '.join(arguments)} took more than {PATIENCE_SECONDS} s")

    signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _written_to(out: BinaryIO, err: BinaryIO) -> Iterator[None]:
    """Replace stdin by an empty input, and stdout and stderr by these files."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull, "rb"))
        for number, file in enumerate((nothing, out, err)):
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(file.fileno(), number)
        opened = [
            stack.enter_context(open(number, mode, encoding="utf-8", closefd=False))
            for number, mode in enumerate(("r", "w", "w"))
        ]
        opened[2].reconfigure(line_buffering=True)
        streams = dict(zip(("stdin", "stdout", "stderr"), opened, strict=True))
        stack.enter_context(mock.patch.multiple(sys, **streams))
        yield


def _all_of(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


def expect_error(done: Done, status: int, *words: str) -> None:
    """Assert that a command failed with one error, without a traceback or a secret.

    `words` are facts in the error: names, numbers and commands, not sentences.
    """
    assert done.status == status, done.err
    errors = [line for line in done.err.splitlines() if line.startswith("caf: error: ")]
    assert len(errors) == 1, done.err
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.err
    assert "hush" not in done.err


@contextlib.contextmanager
def opened_context(
    caf: CommandLine, source: str = "src", *, run: str = "run-1", **more: Any
) -> Iterator[RunContext]:
    """Open what a run of a command line's source works with; `more` as for `open_run_context`."""
    with caf.surroundings(), opened_ledger(settings := load_settings()) as ledger:
        context = open_run_context(settings, source, run=run, ledger=ledger, **more)
        with contextlib.closing(context):
            yield context


def archive_source(caf: CommandLine, source: str = "src", **more: Any) -> None:
    """Archive a source by the steps of a run, without Dagster."""
    with opened_context(caf, source, **more) as context:
        archive_everything(context)


def source_text(endpoint: str, bucket: str, **more: str) -> str:
    """A public source `src` of small chunks, as TOML."""
    lines = {"bucket": bucket, "endpoint_url": endpoint, "target_size": "1MiB"}
    lines |= {"public": "true"} | more
    return "[sources.src]\n" + "".join(f'{name} = "{value}"\n' for name, value in lines.items())
