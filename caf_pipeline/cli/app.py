"""The commands of `caf` put together: all, or the one that is asked for, since the others' modules take time to load."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Final

import typer

from caf_pipeline.cli.terminal import help_of
from caf_pipeline.errors import UsageError


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415  takes longer to load than most commands

        typer.echo(f"caf {version('caf-pipeline')}")
        raise typer.Exit


def _options(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Archive S3 objects on Jackal, and work with CAF files.

    A failure is one sentence on stderr. Every command's help ends with its exit statuses; those of any command are 0 done, 1 this
    machine refuses something, or a bug, 2 wrong arguments, 8 the output cannot be written, as on a full disk, 130 interrupted by
    Ctrl-C, 143 by SIGTERM, 129 by SIGHUP or a closed terminal, and 141 the reader of the output left.
    """
    _show_help(context)


def _jackal(context: typer.Context) -> None:
    """Manage the wallet, its space and what Jackal stores. docs/jackal.md begins with an empty wallet."""
    _show_help(context)


def _cotar(context: typer.Context) -> None:
    """Read files of a tar archive by name, through an index. The index is one that cotar makes or reads."""
    _show_help(context)


def _clps(context: typer.Context) -> None:
    """Look into logs that clp-s packed. docs/formats.md says what is read of them."""
    _show_help(context)


def _logs(context: typer.Context) -> None:
    """Search archived logs that clp-s packed. docs/formats.md says how."""
    _show_help(context)


def _chunkio(context: typer.Context) -> None:
    """Read logs that ChunkIO wrote, also damaged ones. docs/formats.md says what is read of them."""
    _show_help(context)


def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(UsageError.exit_code)


_COMMANDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("create", "list", "extract", "cat", "verify", "merkle"), "archives"),
    "convert": "convert",
    "setup": "setup",
    "run": "run",
    "backfill": "backfill",
    **dict.fromkeys(("plan", "plans"), "plans"),
    "get": "get",
    "status": "status",
    "runs": "runs",
    "queue": "queue",
    "metrics": "metrics",
    **dict.fromkeys(("unpark", "withdraw"), "chunks"),
    "remove": "remove",
    **dict.fromkeys(("ls", "find", "du"), "listing"),
    "restore": "restore",
    "check": "check",
    "export-references": "export_references",
    **dict.fromkeys(("prove", "repair"), "prove"),
    **dict.fromkeys(("pause", "resume", "limit"), "controls"),
    "safe-to-delete": "safe_to_delete",
    "doctor": "doctor",
    "backup": "backup",
    "rebuild": "rebuild",
    "adopt": "adopt",
}
"""In the order of the help: each with its module in this folder."""

_GROUPS: Final[Mapping[str, tuple[Callable[[typer.Context], None], Mapping[str, str]]]] = {
    "jackal": (
        _jackal,
        dict.fromkeys(("wallet", "price", "buy", "files"), "jackal"),
    ),
    "cotar": (_cotar, dict.fromkeys(("index", "list", "cat", "verify"), "cotar")),
    "clps": (_clps, {"inspect": "clps"}),
    "logs": (_logs, {"search": "logs"}),
    "chunkio": (_chunkio, dict.fromkeys(("list", "cat", "verify", "salvage"), "chunkio")),
}


def build(wanted: str = "") -> typer.Typer:
    """Return `caf` with one command or group; with all where there is none of that name."""
    app = typer.Typer(
        name="caf",
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode=None,  # help is plain text: keys and brackets in it are meant as they are
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    is_known = wanted in _COMMANDS or wanted in _GROUPS
    for name, module in _COMMANDS.items():
        if name == wanted or not is_known:
            _add(app, name, module)
    for name, (describe, commands) in _GROUPS.items():
        if name == wanted or not is_known:
            group = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
            group.callback()(describe)
            for each, module in commands.items():
                _add(group, each, module)
            app.add_typer(group, name=name)
    return app


def _add(to: typer.Typer, name: str, module: str) -> None:
    """Add a command: of a module's own table, or the function of its name."""
    loaded = import_module(f"caf_pipeline.cli.{module}")
    for its_name, command, epilog in getattr(loaded, "COMMANDS", ()):
        if its_name == name:
            to.command(name, epilog=epilog)(command)
            return
    command = getattr(loaded, name.replace("-", "_"))
    to.command(name, help=help_of(command))(command)
