"""`caf`, run in this process: what a command says and its status, without starting an interpreter and loading it again.

Not here: what only a process shows, such as being killed (`command_line`).
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from unittest import mock

from caf_pipeline.cli import main
from caf_pipeline_tests.command_line import FOLDER_STORE, FOREIGN, CommandLine, Done


class CommandInside(CommandLine):
    """A command line whose commands run here; `start` starts a process all the same."""

    def __call__(self, *arguments: str, **more: str) -> Done:
        with self._surroundings(more), _written() as (out, err):
            status = main(list(arguments))
        return Done(status, out.getvalue(), err.getvalue().decode())

    @contextlib.contextmanager
    def _surroundings(self, more: dict[str, str]) -> Iterator[None]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        environment = kept | FOLDER_STORE | self.environment | more
        with mock.patch.dict(os.environ, environment, clear=True), contextlib.chdir(self.folder):
            yield


@contextlib.contextmanager
def _written() -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    out, err = io.BytesIO(), io.BytesIO()
    with (
        io.TextIOWrapper(out, "utf-8", write_through=True) as text,
        io.TextIOWrapper(err, "utf-8", write_through=True) as errors,
        mock.patch.multiple(sys, stdout=text, stderr=errors),
    ):
        yield out, err
        text.detach()
        errors.detach()


def inside(caf: CommandLine) -> CommandInside:
    """Return the same command line, run in this process."""
    return CommandInside(caf.folder, caf.environment)
