"""`caf unpark` and `caf withdraw`: what an operator does with a chunk."""

from typing import Annotated

import typer

from caf_pipeline.cli.opened_ledger import opened_ledger
from caf_pipeline.cli.run_opening import opened_run_context
from caf_pipeline.settings import load_settings
from caf_pipeline.steps import chunk_steps

ChunkArgument = Annotated[
    str, typer.Argument(metavar="CHUNK", help="A chunk's id, as `caf status` shows it.")
]


def unpark(chunk: ChunkArgument) -> None:
    r"""Let runs work on a parked chunk again.

    Do so once what stopped it is mended.

    Exit status: 0; 6 the chunk is not parked, or the database failed; 10 a run works on it; 11
    there is no such chunk.
    """
    settings = load_settings()
    with (
        opened_ledger(settings) as ledger,
        opened_run_context(settings, ledger, ledger.chunks.get(chunk).source) as context,
    ):
        typer.echo(
            f"{chunk} is '{chunk_steps.unpark(context, chunk).state}'; the next run goes on with it"
        )


def withdraw(chunk: ChunkArgument) -> None:
    r"""Give up a chunk before its post, or a damaged one.

    The next plan takes its objects again, as far as S3 still has them.

    Exit status: 0; 6 the chunk is posted and not damaged, its post may still be included, or the
    database failed; 10 a run works on it; 11 there is no such chunk.
    """
    settings = load_settings()
    with (
        opened_ledger(settings) as ledger,
        opened_run_context(settings, ledger, ledger.chunks.get(chunk).source) as context,
    ):
        chunk_steps.withdraw(context, chunk)
        typer.echo(f"{chunk} is withdrawn; its objects are planned again by the next plan")
