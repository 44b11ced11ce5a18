"""The commands of `caf` put together.

A command is added by a module's `add_to(app)`.
"""

from importlib.metadata import version
from typing import Annotated, Any

import typer

from caf_pipeline.cli import archives, doctor, jackal, pipeline, rebuild
from caf_pipeline.cli import safe_to_delete as deletion
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
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(UsageError.exit_code)


archives.add_to(app)
pipeline.add_to(app)
deletion.add_to(app)
doctor.add_to(app)
jackal.add_to(app)
rebuild.add_to(app)


def command() -> Any:  # noqa: ANN401  the type that typer builds is not part of its public names
    """Return the whole command line, to be run with `.main(…)`."""
    return typer.main.get_command(app)
