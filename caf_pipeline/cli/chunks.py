"""`caf unpark` and `caf withdraw`: what an operator does with a chunk."""

from typing import Annotated

import typer

from caf_pipeline.cli.opening import load_settings, opened_ledger, opened_run_context

ChunkArgument = Annotated[str, typer.Argument(metavar="CHUNK", help="A chunk's id, as `caf status` shows it.")]


def unpark(chunk: ChunkArgument) -> None:
    r"""Let runs work on a parked chunk again.

    Do so once what stopped it is mended.

    Exit status: 0; 6 the chunk is not parked, or the database failed; 10 a run works on it; 11 there is no such chunk.
    """
    from caf_pipeline.steps import chunk_steps  # noqa: PLC0415  loaded by the commands that use it

    settings = load_settings()
    with opened_ledger(settings) as ledger, opened_run_context(settings, ledger, ledger.chunk(chunk).source) as context:
        typer.echo(f"{chunk} is '{chunk_steps.unpark(context, chunk).state}'; the next run goes on with it")


def withdraw(chunk: ChunkArgument) -> None:
    r"""Give up a chunk before its post, or a damaged one.

    The next plan takes its objects again, as far as S3 still has them.

    Exit status: 0; 6 the chunk is posted and not damaged, its post may still be included, or the database failed; 10 a run works
    on it; 11 there is no such chunk.
    """
    from caf_pipeline.steps import chunk_steps  # noqa: PLC0415  loaded by the commands that use it

    settings = load_settings()
    with opened_ledger(settings) as ledger, opened_run_context(settings, ledger, ledger.chunk(chunk).source) as context:
        chunk_steps.withdraw(context, chunk)
        typer.echo(f"{chunk} is withdrawn; its objects are planned again by the next plan")
