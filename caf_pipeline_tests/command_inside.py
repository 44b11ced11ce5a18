"""`caf`, run in this process: what a command says and its status, without starting an interpreter and loading it again.

Not here: what only a process shows, such as being killed (`command_line`).
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from unittest import mock

from caf_pipeline.assembly import close_store, open_workplace
from caf_pipeline.cli import main
from caf_pipeline.cli.doors import opened_ledger
from caf_pipeline.settings import load_settings
from caf_pipeline_tests.command_line import FOLDER_STORE, FOREIGN, CommandLine, Done
from caf_pipeline_tests.workplaces import archive_everything


class CommandInside(CommandLine):
    """A command line whose commands run here; `start` starts a process all the same."""

    def __call__(self, *arguments: str, **more: str) -> Done:
        with self.surroundings(**more), _written() as (out, err):
            status = main(list(arguments))
        return Done(status, out.getvalue(), err.getvalue().decode())

    @contextlib.contextmanager
    def surroundings(self, **more: str) -> Iterator[None]:
        """Let this process be in the folder, with these variables only."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        environment = kept | FOLDER_STORE | self.environment | more
        with mock.patch.dict(os.environ, environment, clear=True), contextlib.chdir(self.folder):
            yield


@contextlib.contextmanager
def _written() -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    out, err = io.BytesIO(), io.BytesIO()
    text, errors = (io.TextIOWrapper(each, "utf-8", write_through=True) for each in (out, err))
    with mock.patch.multiple(sys, stdout=text, stderr=errors):
        yield out, err
    text.detach()  # or they would be closed with it
    errors.detach()


def inside(caf: CommandLine) -> CommandInside:
    """Return the same command line, run in this process."""
    return CommandInside(caf.folder, caf.environment)


def archive_source(caf: CommandInside, source: str = "src") -> None:
    """Archive what a source has with this command line's settings, by the steps of a run and without Dagster."""
    with caf.surroundings():
        settings = load_settings()
        with opened_ledger(settings) as ledger:
            work = open_workplace(settings, source, run="run-1", ledger=ledger)
            archive_everything(work)
            close_store(work.store)
