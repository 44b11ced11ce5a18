"""`caf remove`."""

from collections.abc import Sequence
from typing import Annotated

import typer

from caf_pipeline.cli.opening import RUN
from caf_pipeline.cli.terminal import YesOption, confirm, printable
from caf_pipeline.settings import load_settings


def remove(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A source of the ledger, even if caf.toml lacks it."),
    ],
    yes: YesOption = False,
) -> int:
    r"""Remove a source that has no stored chunk.

    After a typo in `bucket`, `prefix` or `endpoint_url`, this frees the source's name. The command
    shows what it removes, and asks first. It removes plans, chunks that were not posted, snapshots,
    staged files, and the partitions in Dagster, but nothing in the bucket or the store. It refuses
    if a chunk is or may be stored. If a run wanted to post a chunk, the command asks the store.

    If it is interrupted, repeat it.

    \b
    Example:
      caf remove demo --yes

    \b
    Exit status: 0, 3, 7, 10
      1   You did not confirm.
      2   There is no terminal to ask on; use --yes.
      6   A chunk is or may be stored, a rebuild is incomplete, or the database failed.
      8   A file cannot be removed.
      11  The ledger never had the source.
    """
    from caf_pipeline.dagster_host.remove import remove_command  # noqa: PLC0415 - loads Dagster

    def ask(lines: Sequence[str]) -> None:
        for line in lines:
            typer.echo(printable(line), err=True)
        confirm("Remove it?", yes=yes, otherwise="nothing was removed")

    settings = load_settings()
    return remove_command(source, settings=settings, run=RUN, confirm=ask)
