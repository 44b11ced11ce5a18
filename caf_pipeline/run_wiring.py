"""Opens what runs and commands work with beside what reading needs, as the settings say: stores,
sources, run contexts.

What takes long to load (boto3, the chain's messages) is loaded where it is opened.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import LedgerError, SettingsError, UsageError
from caf_pipeline.ledger.backup import BackupContents, Programs, back_up, read_backup, restore
from caf_pipeline.ledger.database import database_of, has_own_server, waiting_for_database
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.processes import this_process
from caf_pipeline.ledger.protocol import LocationLookups
from caf_pipeline.ledger.records import Holder
from caf_pipeline.retrieval.restore import RestoreTarget
from caf_pipeline.retrieval.restore_folder import RestoreFolder
from caf_pipeline.run_context import Lazy, RunContext
from caf_pipeline.settings import Settings
from caf_pipeline.source.protocol import EventQueue, ObjectSource
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline.store.protocol import ChunkReader, ChunkStore
from caf_pipeline.system.files_below import FilesBelow, is_folder
from caf_pipeline.throttle import open_throttle
from caf_pipeline.waits import Listener, Wait, Waits

if TYPE_CHECKING:
    from caf_pipeline.store.jackal.write import JackalStore

BUCKET_SCHEME: Final = "s3://"


def open_ledger(settings: Settings, waits: Waits | None = None) -> Ledger:
    """Return the ledger that the settings name, with its tables.

    `waits` says it while the database does not answer, and while its tables are made.

    Raises: LedgerUnreachable, LedgerError: it cannot be used. The message names the database
        without its password.
    """
    waits = waits or Waits()
    with contextlib.ExitStack() as opened:
        with waiting_for_database(settings, waits):
            ledger = Ledger(database_of(settings), store=settings.store.kind)
            opened.callback(ledger.close)
            ledger.bring_up(waits)
        opened.pop_all()
    return ledger


def back_up_ledger(settings: Settings, ledger: Ledger, path: Path) -> int:
    """Write a backup of the ledger: see `ledger.backup.back_up`."""
    return back_up(ledger.database, path, embedded=not has_own_server(settings))


def inspect_backup(settings: Settings, ledger: Ledger, path: Path) -> BackupContents:
    """Return what a backup says of itself: see `ledger.backup.read_backup`."""
    return read_backup(Programs(ledger.database, embedded=not has_own_server(settings)), path)


def restore_ledger(settings: Settings, ledger: Ledger, path: Path) -> None:
    """Replace the ledger by a backup, with everything paused: see `ledger.backup.restore`."""
    programs = Programs(ledger.database, embedded=not has_own_server(settings))
    restore(programs, path, reason="a backup was restored: run `caf doctor`, then `caf resume`")


def open_store(
    settings: Settings, ledger: Ledger, holder: Holder, waits: Waits | None = None
) -> ChunkStore:
    """Open the store that the settings name."""
    if settings.store.kind == "jackal":
        return open_jackal(settings, ledger, holder, waits)
    return DirectoryStore(settings.store.folder, ledger.folder_store)


def open_jackal(
    settings: Settings, ledger: Ledger, holder: Holder, waits: Waits | None = None
) -> "JackalStore":
    """Open the store on Jackal.

    Raises:
        SettingsError: the settings keep chunks elsewhere, or lack what the network needs.
    """
    _require_jackal(settings)
    from caf_pipeline.store.jackal.write import open_jackal_store  # noqa: PLC0415 - half a second that a folder does not need

    throttle = open_throttle(settings.jackal, ledger.controls.current, waits)
    return open_jackal_store(
        settings.jackal, ledger.transactions(holder), ledger.providers, throttle, waits
    )


def jackal_of(context: RunContext) -> "JackalStore":
    """Return the run context's store, as what it is on Jackal.

    Raises:
        SettingsError: the settings keep chunks elsewhere.
    """
    _require_jackal(context.settings)
    return cast("JackalStore", context.store)


def _require_jackal(settings: Settings) -> None:
    if settings.store.kind != "jackal":
        raise SettingsError(
            f"store.kind is '{settings.store.kind}': nothing here is kept on Jackal",
            hint='set store.kind = "jackal" in caf.toml; docs/how-to/connect-jackal.md says what '
            "else it takes",
        )


@contextlib.contextmanager
def open_restore(
    lookup: LocationLookups,
    store: ChunkReader,
    destination: str,
    *,
    force: bool = False,
    dry_run: bool = False,
    profile: str = "",
    endpoint_url: str = "",
    waits: Waits | None = None,
) -> Iterator[RestoreTarget]:
    """Open what objects are restored to, while the context lasts.

    Args:
        lookup: has the headers of the objects.
        store: keeps them.
        destination: a folder, or `s3://BUCKET/PREFIX`.
        force: replace what is there and is not equal.
        dry_run: write nothing.
        profile: of a bucket; "": as the AWS tools find it.
        endpoint_url: of a bucket's server; likewise.
        waits: told while a bucket does not answer.

    Raises: UsageError, SettingsError: it names no place. StagingError: the folder cannot be
        written. HeldByOther: another process restores into it.
    """
    if not destination:
        raise UsageError(
            "what to restore to is empty",
            hint="give a folder ('.' is this one), or s3://BUCKET/PREFIX",
        )
    with contextlib.ExitStack() as stack:
        if not destination.startswith(BUCKET_SCHEME):
            # More likely a slip of the hand than a folder of that name.
            if address := re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", destination):
                raise UsageError(
                    f"{destination!r} begins as an address, and of these only s3:// is known",
                    hint=f"give s3://BUCKET/PREFIX, or './{address[0]}…' for a folder of that name",
                )
            folder = Path(destination)
            there = not dry_run or is_folder(folder)
            files = stack.enter_context(FilesBelow(folder, force=force)) if there else None
            if files and not dry_run:
                files.own()
            yield RestoreFolder(files, store, force=force, dry_run=dry_run)
            return
        from caf_pipeline.retrieval.restore_bucket import RestoreBucket  # noqa: PLC0415
        from caf_pipeline.source.s3.target import open_bucket_target  # noqa: PLC0415

        bucket = stack.enter_context(
            contextlib.closing(
                open_bucket_target(
                    destination, profile=profile, endpoint_url=endpoint_url, waits=waits or Waits()
                )
            )
        )
        yield RestoreBucket(bucket, store, lookup, force=force, dry_run=dry_run)


def open_source(settings: Settings, source: str, waits: Waits, client: Any = None) -> ObjectSource:  # noqa: ANN401
    """Open the S3 source of this name, with a boto3 client of its own where none is given."""
    from caf_pipeline.source.s3.source import open_s3_source  # noqa: PLC0415 - half a second that reading the ledger does not need

    packing = settings.packing
    return open_s3_source(
        source,
        settings.source(source),
        attempts=packing.request_attempts,
        connections=packing.fetch_threads,
        client=client,
        waits=waits,
    )


def open_queue(settings: Settings, source: str) -> EventQueue:
    """Open the queue of a source's event notifications."""
    from caf_pipeline.source.s3.queue import open_event_queue  # noqa: PLC0415 - as above

    return open_event_queue(source, settings.source(source))


def open_run_context(
    settings: Settings,
    source: str,
    *,
    run: str,
    ledger: Ledger | None = None,
    store: Callable[[Ledger, Holder, Waits], ChunkStore] | None = None,
    client: Any = None,  # noqa: ANN401 - boto3's clients have no type of their own
    objects: ObjectSource | None = None,
    progress: Callable[[int, int], None] | None = None,
    upload_progress: Callable[[int], None] | None = None,
    ended: Callable[[ChunkState], None] | None = None,
    waiting: Listener | None = None,
    register: bool = True,
) -> RunContext:
    """Return what the steps of one source work with.

    Objects and store are opened when a step asks for them; close it.

    Args:
        settings: all settings.
        source: the source's name.
        run: who works, e.g. a Dagster run id.
        ledger: an open ledger to use, which the context does not close.
        store: opens the store, instead of `open_store`, and closes it.
        client: a boto3 S3 client to use.
        objects: an open source to use, so that nothing of S3 is opened.
        progress: see `RunContext`.
        upload_progress: see `RunContext`.
        ended: see `RunContext`.
        waiting: told what is waited for, beside the ledger, which every process can ask.
        register: make the source known to the ledger.
    """
    holder = this_process(run)
    lazy_ledger = Lazy.of(ledger) if ledger else Lazy(lambda: open_ledger(settings), Ledger.close)
    waits = Waits(*([waiting] if waiting else []), _recorder(lazy_ledger, holder, source))
    told: dict[str, Any] = {
        "progress": progress,
        "upload_progress": upload_progress,
        "ended": ended,
    }
    context = RunContext(
        source=source,
        settings=settings,
        holder=holder,
        lazy_objects=Lazy.of(objects)
        if objects
        else Lazy(lambda: open_source(settings, source, waits, client)),
        lazy_store=Lazy(lambda: store(lazy_ledger.get(), holder, waits))
        if store
        else Lazy(
            lambda: open_store(settings, lazy_ledger.get(), holder, waits),
            lambda opened: opened.close(),
        ),
        lazy_ledger=lazy_ledger,
        throttle=open_throttle(
            settings.jackal,
            lambda: lazy_ledger.get().controls.current(),  # noqa: PLW0108 - opened late
            waits,
        ),
        waits=waits,
        **{name: listener for name, listener in told.items() if listener},
    )
    if register:
        context.ledger.sources.register(source, context.archive_id, context.address)
    return context


def _recorder(ledger: Lazy[Ledger], holder: Holder, source: str) -> Listener:
    """Return what writes a run's waits to the ledger."""

    def record(waits: Sequence[Wait]) -> None:
        # A ledger that is away shows no waits; the work that needs it says so itself.
        with contextlib.suppress(LedgerError):
            ledger.get().waits.record(holder, source, waits)

    return record
