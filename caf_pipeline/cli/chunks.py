"""`caf unpark` and `caf withdraw`."""

from typing import Annotated

import typer

from caf_pipeline.chunk_state import CLAIMING, CopyState
from caf_pipeline.cli.opening import opened_ledger, opened_run_context
from caf_pipeline.settings import load_settings
from caf_pipeline.steps import chunk_steps

ChunkArgument = Annotated[
    str, typer.Argument(metavar="CHUNK", help="A chunk's id, as shown by `caf status`.")
]


def unpark(chunk: ChunkArgument) -> None:
    r"""Let runs work on a parked chunk again.

    Use it after you fixed the reason, which `caf status` shows.

    \b
    Exit status: 0, 10, 11
      6  The chunk was not parked, or the database failed.
    """
    settings = load_settings()
    with (
        opened_ledger(settings) as ledger,
        opened_run_context(settings, ledger, ledger.chunks.get(chunk).source) as context,
    ):
        state = chunk_steps.unpark(context, chunk).state
        typer.echo(f"{chunk} is '{state}'; the next run continues it")


def withdraw(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CHUNK|SOURCE",
            help="A chunk's id, as shown by `caf status`, or a source: all its unposted chunks.",
        ),
    ],
) -> None:
    r"""Give up a chunk that is not posted, or a damaged one.

    The next plan includes its objects again if S3 still has them. If a run wanted to post the
    chunk, the command first asks the store for the post.

    \b
    Exit status: 0, 7, 10, 11
      6  The chunk is posted and not damaged, its post is pending, or the database failed.
    """
    settings = load_settings()
    with opened_ledger(settings) as ledger:
        if what in ledger.lookup.sources():
            source = what
            unposted = [
                chunk.name
                for chunk in ledger.chunks.list(source, CLAIMING)
                if chunk.copy_state in (None, CopyState.WANTED, CopyState.POSTING)
            ]
        else:
            source, unposted = ledger.chunks.get(what).source, [what]
        with opened_run_context(settings, ledger, source, register=False) as context:
            chunk_steps.withdraw_all(context, unposted)
        if not unposted:
            typer.echo(f"{source} has no chunk that is not posted")
        for name in unposted:
            typer.echo(f"{name} is withdrawn; its objects are planned again by the next plan")
