"""Builds the command `caf`: all commands, or only the requested one."""

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperArgument

from caf_pipeline.cli.terminal import help_of
from caf_pipeline.errors import UsageError


def _type_in_help(argument: TyperArgument, ctx: Any) -> str | None:  # noqa: ANN401 - a click Context
    return None if argument.metavar else argument.display_type(ctx)


# Typer 0.29 shows the Python type even if a metavar explains the argument: "FILE <list[Path]>".
TyperArgument.display_type_rich = _type_in_help  # type: ignore[assignment,method-assign]


def _print_version(requested: bool) -> None:
    if requested:
        from caf_pipeline.cli.about import version  # noqa: PLC0415  slower than most commands

        version()
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

    Errors are one sentence on stderr. The help of every command ends with its exit statuses. Every
    command can also end with 1 (this machine refuses something, or a bug), 2 (wrong arguments), 8
    (the output cannot be written), 130 (Ctrl-C), 143 (SIGTERM), 129 (SIGHUP or a closed terminal)
    and 141 (the reader of the output left).

    Help and errors name pages such as docs/how-to/restore.md: `caf help PAGE` prints one.
    """
    _show_help(context)


def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(UsageError.exit_code)


_COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "create": ("archives", "Pack files into a CAF file."),
    "list": ("archives:list_members", "List the members of a CAF file."),
    "extract": ("archives", "Write a CAF file's members below a folder."),
    "cat": ("archives", "Write one member of a CAF file to stdout."),
    "verify": ("archives", "Check a CAF file's structure and read every byte of it."),
    "merkle": ("archives", "Print the Jackal Merkle root of any file, in hex."),
    "convert": ("convert", "Convert between CAF and tar archives."),
    "init": ("init", "Write a caf.toml for a bucket, and make its keys."),
    "policy": ("policy", "Print the least IAM policy for a source, as JSON."),
    "setup": ("setup", "Prepare DAGSTER_HOME and the limits of Dagster's pools."),
    "ui": ("ui", "Serve Dagster's UI and daemon until Ctrl-C."),
    "run": ("run", "Take an inventory, plan what is new, and archive it."),
    "backfill": ("backfill", "Archive planned chunks with Dagster's daemon."),
    "plan": ("plans", "Show what a plan of a source would do and cost."),
    "plans": ("plans", "List plans; show one plan, or one of its chunks."),
    "get": ("get", "Fetch one archived object."),
    "status": ("status", "Show sources and chunks as the ledger has them."),
    "runs": ("runs", "Show current runs and how the last ones ended."),
    "queue": ("queue", "Show messages of a source's queue that are not events."),
    "metrics": ("metrics", "Print the numbers of each source for Prometheus."),
    "unpark": ("chunks", "Let runs work on a parked chunk again."),
    "withdraw": ("chunks", "Give up a chunk that is not posted, or a damaged one."),
    "remove": ("remove", "Remove a source that has no stored chunk."),
    "ls": ("listing", "List archived objects below a prefix."),
    "find": ("listing", "Find archived objects by pattern, size and time."),
    "du": ("listing", "Sum up archived objects below a prefix."),
    "restore": ("restore", "Write archived objects to a folder or a bucket."),
    "check": ("check", "Read archived objects back and compare their SHA-256."),
    "export-references": (
        "export_references",
        "Write the URLs and byte ranges of archived objects.",
    ),
    "prove": ("prove", "Check the proofs and some bytes of stored chunks."),
    "repair": ("prove", "Store damaged chunks again."),
    "pause": ("controls", "Hold every run where it is, and launch no more."),
    "resume": ("controls", "End a pause."),
    "limit": ("controls", "Limit what runs may upload and spend."),
    "safe-to-delete": ("safe_to_delete", "List the objects that may be deleted in S3."),
    "doctor": ("doctor", "Find what crashes left, and repair it."),
    "backup": ("backup", "Back up the ledger, or restore it."),
    "rebuild": ("rebuild", "Restore a lost ledger, or lost rows, from the chunks."),
    "adopt": ("adopt", "Adopt CAF files that other programs posted."),
    "version": ("about", "Print the version, as --version does."),
    "help": ("about:show_help", "Print the help of a command, or a page of the docs."),
    "completion": ("about", "Print the script that lets a shell complete `caf`."),
}
"""Module (and function, if named otherwise) and summary, in the order of help."""

_GROUPS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "jackal": (
        "Manage the wallet, its space and the files on Jackal. Start with "
        "docs/how-to/connect-jackal.md.",
        dict.fromkeys(("wallet", "price", "buy", "files"), "jackal"),
    ),
    "keys": (
        "Make and show the keys of private sources. See docs/how-to/encryption.md.",
        dict.fromkeys(("new", "show", "check", "worker"), "keys"),
    ),
    "cotar": (
        "Read files of a tar archive through a cotar index.",
        {"index": "cotar", "list": "cotar:list_files", "cat": "cotar", "verify": "cotar"},
    ),
    "clps": (
        "Inspect logs that clp-s packed. See docs/how-to/search-logs.md.",
        {"inspect": "clps"},
    ),
    "logs": (
        "Search archived logs that clp-s packed. See docs/how-to/search-logs.md.",
        {"search": "logs"},
    ),
    "chunkio": (
        "Read logs that ChunkIO wrote, even damaged ones. See docs/how-to/search-logs.md.",
        dict.fromkeys(("list", "cat", "verify", "salvage"), "chunkio"),
    ),
}

_SUBCOMMANDS: Final[Mapping[tuple[str, str], Mapping[str, str]]] = {
    ("jackal", "wallet"): {"new": "wallet"},
}
"""Commands below a command of a group."""


def build(command: str | None = None) -> typer.Typer:
    """Return `caf` with all commands, or with the named command or group alone.

    An unknown name gives only the summaries, and loads no module.
    """
    app = typer.Typer(
        name="caf",
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode=None,  # help is plain text with keys and brackets in it
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    is_known = command in _COMMANDS or command in _GROUPS
    for name, (place, summary) in _COMMANDS.items():
        if command in (None, name):
            _add(app, name, place)
        elif not is_known:
            app.command(name, help=summary)(lambda: None)
    for name, (description, commands) in _GROUPS.items():
        if is_known and command != name:
            continue
        group = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
        group.callback(help=description)(_show_help)
        if command in (None, name):
            for subcommand, place in commands.items():
                _add(group, subcommand, place, _SUBCOMMANDS.get((name, subcommand), {}))
        app.add_typer(group, name=name)
    return app


def _add(
    app: typer.Typer, name: str, place: str, subcommands: Mapping[str, str] | None = None
) -> None:
    module, _, function = place.partition(":")
    loaded = import_module(f"caf_pipeline.cli.{module}")
    command = getattr(loaded, function or name.replace("-", "_"))
    if not subcommands:
        app.command(name, help=help_of(command))(command)
        return
    group = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
    group.callback(help=help_of(command))(command)
    for subcommand, subplace in subcommands.items():
        _add(group, subcommand, subplace)
    app.add_typer(group, name=name)
