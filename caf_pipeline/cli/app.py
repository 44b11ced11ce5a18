"""The commands of `caf` put together."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from caf_pipeline.cli import archives, controls, convert, cotar, jackal, listing, pipeline, plans, prove
from caf_pipeline.cli.backfill import backfill
from caf_pipeline.cli.check import check
from caf_pipeline.cli.doctor import doctor
from caf_pipeline.cli.export_references import export_references
from caf_pipeline.cli.queue import queue
from caf_pipeline.cli.rebuild import rebuild
from caf_pipeline.cli.restore import restore
from caf_pipeline.cli.runs import runs
from caf_pipeline.cli.safe_to_delete import safe_to_delete
from caf_pipeline.cli.terminal import help_of
from caf_pipeline.errors import UsageError

app = typer.Typer(
    name="caf",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,  # help is plain text: keys and brackets in it are meant as they are
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"caf {version('caf-pipeline')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Archive S3 objects on Jackal, and work with CAF files.

    Every command's help ends with its exit statuses. Failures are told in one sentence on stderr.
    """
    _show_help(context)


def _jackal(context: typer.Context) -> None:
    """Look after the wallet, its space and what is stored on Jackal. docs/jackal.md begins with an empty wallet."""
    _show_help(context)


def _cotar(context: typer.Context) -> None:
    """Read files of a tar archive by their names, through an index that cotar made or reads."""
    _show_help(context)


def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(UsageError.exit_code)


def _add(to: typer.Typer, *commands: Callable[..., object]) -> None:
    for each in commands:
        to.command(each.__name__.replace("_", "-"), help=help_of(each))(each)


for _name, _command, _epilog in archives.COMMANDS:
    app.command(_name, epilog=_epilog)(_command)
app.command("convert", epilog=convert.EPILOG)(convert.convert)
_add(
    app,
    pipeline.run,
    backfill,
    plans.plan,
    plans.plans,
    pipeline.get,
    pipeline.status,
    runs,
    queue,
    pipeline.unpark,
    pipeline.withdraw,
)
_add(app, listing.ls, listing.find, listing.du, restore, check, export_references, safe_to_delete, doctor, rebuild)
_group = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
_group.callback()(_jackal)
_add(_group, jackal.account, jackal.price, jackal.buy, jackal.files, prove.prove, prove.repair)
_add(_group, controls.pause, controls.resume, controls.limit)
app.add_typer(_group, name="jackal")
_tars = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
_tars.callback()(_cotar)
for _name, _command, _epilog in cotar.COMMANDS:
    _tars.command(_name, epilog=_epilog)(_command)
app.add_typer(_tars, name="cotar")
