"""The commands of `caf` put together: all, or the one that is asked for, since the others' modules
take time to load.
"""

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
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Archive S3 objects on Jackal, and work with CAF files.

    A failure is one sentence on stderr. Every command's help ends with its exit statuses; those of
    any command are 0 done, 1 this machine refuses something, or a bug, 2 wrong arguments, 8 the
    output cannot be written, as on a full disk, 130 interrupted by Ctrl-C, 143 by SIGTERM, 129 by
    SIGHUP or a closed terminal, and 141 the reader of the output left.
    """
    _show_help(context)


def _jackal(context: typer.Context) -> None:
    """Manage the wallet, its space and what Jackal stores. docs/how-to/connect-jackal.md begins
    with an empty wallet.
    """
    _show_help(context)


def _cotar(context: typer.Context) -> None:
    """Read files of a tar archive by name, through an index.

    The index is one that cotar makes or reads.
    """
    _show_help(context)


def _clps(context: typer.Context) -> None:
    """Look into logs that clp-s packed. docs/how-to/search-logs.md says what is read of them."""
    _show_help(context)


def _logs(context: typer.Context) -> None:
    """Search archived logs that clp-s packed. docs/how-to/search-logs.md says how."""
    _show_help(context)


def _chunkio(context: typer.Context) -> None:
    """Read logs that ChunkIO wrote, also damaged ones. docs/how-to/search-logs.md says what is read
    of them.
    """
    _show_help(context)


def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(UsageError.exit_code)


_COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "create": ("archives", "Pack files into a CAF file."),
    "list": ("archives", "List the members of a CAF file."),
    "extract": ("archives", "Write a CAF file's members below a folder."),
    "cat": ("archives", "Write one member of a CAF file to stdout."),
    "verify": ("archives", "Check a CAF file's structure and read every byte of it."),
    "merkle": ("archives", "Print the Jackal Merkle root of any file, in hex."),
    "convert": ("convert", "Make a tar archive of a CAF, or a CAF of a tar archive."),
    "setup": ("setup", "Prepare DAGSTER_HOME and the limits of Dagster's pools."),
    "run": ("run", "Take an inventory, plan what is new, and archive it."),
    "backfill": ("backfill", "Let Dagster's daemon archive a source's planned chunks."),
    "plan": ("plans", "Show what a plan of a source would do and cost."),
    "plans": ("plans", "List plans; show one plan, or one of its chunks."),
    "get": ("get", "Fetch one archived object."),
    "status": ("status", "Show sources and chunks as the ledger has them."),
    "runs": ("runs", "Show the runs that go on, and how the last ones ended."),
    "queue": ("queue", "Show messages of a source's queue that are not events."),
    "metrics": ("metrics", "Print the numbers of each source as OpenMetrics."),
    "unpark": ("chunks", "Let runs work on a parked chunk again."),
    "withdraw": ("chunks", "Give up a chunk before its post, or a damaged one."),
    "remove": ("remove", "Remove a source that has no stored chunk."),
    "ls": ("listing", "List what is archived below a prefix."),
    "find": ("listing", "Find archived objects by pattern, size and time."),
    "du": ("listing", "Sum up archived objects below a prefix."),
    "restore": ("restore", "Write archived objects to a folder or a bucket."),
    "check": ("check", "Read archived objects back and compare their SHA-256."),
    "export-references": ("export_references", "Write where each archived object's bytes are."),
    "prove": ("prove", "Check the proofs and some bytes of stored chunks."),
    "repair": ("prove", "Store damaged chunks again."),
    "pause": ("controls", "Hold every run where it is, and launch no more."),
    "resume": ("controls", "End a pause."),
    "limit": ("controls", "Limit what runs may upload and spend."),
    "safe-to-delete": ("safe_to_delete", "List the objects that may be deleted in S3."),
    "doctor": ("doctor", "Find what crashes left, and mend it."),
    "backup": ("backup", "Back up the ledger, or restore it."),
    "rebuild": ("rebuild", "Restore a lost ledger from what the store lists."),
    "adopt": ("adopt", "Take over CAF files that other programs posted."),
}
"""In the order of the help: each with its module in this folder, and the first sentence of its
help.
"""

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


def build(wanted: str | None = None) -> typer.Typer:
    """Return `caf` with all commands, or with the wanted one alone.

    If there is no command of the wanted name, each is there with its summary, and no command's
    module is loaded.
    """
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
    for name, (module, summary) in _COMMANDS.items():
        if wanted in (None, name):
            _add(app, name, module)
        elif not is_known:
            app.command(name, help=summary)(_not_loaded)
    for name, (describe, commands) in _GROUPS.items():
        if is_known and wanted != name:
            continue
        group = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
        group.callback()(describe)
        if wanted in (None, name):
            for command, module in commands.items():
                _add(group, command, module)
        app.add_typer(group, name=name)
    return app


def _not_loaded() -> None:
    """Stand for a command that is not wanted."""


def _add(to: typer.Typer, name: str, module: str) -> None:
    """Add a command: of a module's own table, or the function of its name."""
    loaded = import_module(f"caf_pipeline.cli.{module}")
    for its_name, command, epilog in getattr(loaded, "COMMANDS", ()):
        if its_name == name:
            to.command(name, epilog=epilog)(command)
            return
    command = getattr(loaded, name.replace("-", "_"))
    to.command(name, help=help_of(command))(command)
