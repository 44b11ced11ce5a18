"""`caf backup`."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from caf_pipeline.cli.opening import opened_ledger
from caf_pipeline.cli.terminal import (
    YesOption,
    confirm,
    counted,
    printable,
    progress,
    show_size,
)
from caf_pipeline.errors import HeldByOther, UsageError
from caf_pipeline.ledger.backup import Programs, back_up, read_backup
from caf_pipeline.ledger.backup import restore as restore_backup
from caf_pipeline.ledger.database import has_own_server
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.run_context import address_of
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.system.processes import is_alive


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The backup file.")],
    restore: Annotated[
        bool, typer.Option("--restore", help="Replace the ledger with the backup.")
    ] = False,
    unverified: Annotated[
        bool,
        typer.Option("--unverified", help="Restore a file that does not end with its hash."),
    ] = False,
    yes: YesOption = False,
) -> None:
    r"""Back up the ledger, or restore it.

    A backup shows the ledger at one moment, even while runs go on. Its format is pg_dump's custom
    format, with a SHA-256 at the end, and only you can read it. It contains the names of all
    objects. Its only secret is the key that shows the ledger its own posts. Staged files, plans and
    words of the wallet are not in it: see docs/how-to/backup.md.

    --restore replaces the ledger in one transaction; an interrupted restore changes nothing. It is
    refused during a run, and for a damaged file. Afterwards everything is paused: run `caf doctor`
    to find what was archived since the backup, then `caf resume`. Restore only your own files,
    because a backup is a program for the database.

    --unverified restores a file without the SHA-256, such as one of pg_dump. Then `caf resume` is
    refused until `caf doctor` finds that the ledger fits the store.

    \b
    Examples:
      caf backup ledger.dump
      caf backup --restore ledger.dump

    \b
    Exit status: 0, 3, 8, 10
      1  You did not confirm.
      2  FILE exists, belongs to another archive, or is not a readable backup with a SHA-256.
      6  The database failed, no pg_dump has its version, or FILE has other definitions.
      9  FILE is damaged: its bytes do not match its SHA-256.
    """
    settings = load_settings()
    with opened_ledger(settings) as ledger:
        if restore:
            _restore(settings, ledger, file, unverified=unverified, yes=yes)
        else:
            embedded = not has_own_server(settings)
            with progress("backing up", None) as advance:
                size_bytes = back_up(ledger.database, file, embedded=embedded, advance=advance)
            typer.echo(f"{printable(str(file))}: {show_size(size_bytes)}")


def _restore(
    settings: Settings, ledger: Ledger, file: Path, *, unverified: bool, yes: bool
) -> None:
    programs = Programs(ledger.database, embedded=not has_own_server(settings))
    size_bytes = file.stat().st_size if file.is_file() else 0
    with progress("comparing with its SHA-256", size_bytes) as advance:
        contents = read_backup(programs, file, unverified=unverified, advance=advance)
    for name, source in settings.sources.items():
        recorded = contents.sources.get(name)
        if recorded is not None and recorded != address_of(source):
            raise UsageError(
                f"source '{name}' is {printable(recorded)} in the backup, and {address_of(source)} "
                "in the settings.",
                hint="FILE is a backup of another archive: check FILE and caf.toml.",
            )
    for lease in ledger.leases.list():
        holder = lease.holder
        alive = is_alive(holder.boot_id, holder.pid, holder.process_started)
        if lease.live if alive is None else alive:
            raise HeldByOther(
                f"{lease.name} is held by run {holder.run} (process {holder.pid}); nothing was "
                "restored",
                holder=holder.run,
                hint="end it first",
            )
        ledger.leases.end(lease.name, lease.epoch)  # expired, or its process is dead
    typer.echo(f"the backup has  {_named(contents.sources)}", err=True)
    typer.echo(
        f"the ledger has  {_named(ledger.lookup.sources())}, "
        f"{counted(len(ledger.chunks.list()), 'chunk')}",
        err=True,
    )
    confirm("Replace the ledger with the backup?", yes=yes, otherwise="nothing was restored")
    # Best effort: each file counts only for a chunk with the same number, name and time.
    shutil.rmtree(settings.home / "located", ignore_errors=True)
    reason = "a backup was restored: run `caf doctor`, then `caf resume`"
    with progress("restoring", size_bytes) as advance:
        restore_backup(programs, file, reason=reason, unverified=unverified, advance=advance)
    with opened_ledger(settings) as restored:
        chunks = counted(len(restored.chunks.list()), "chunk")
    typer.echo(
        f"restored, with {chunks}; everything is paused: run 'caf doctor', then 'caf resume'"
    )


def _named(sources: Iterable[str]) -> str:
    names = sorted(sources)
    return printable(
        f"{counted(len(names), 'source')} ({', '.join(names)})" if names else "no source"
    )
