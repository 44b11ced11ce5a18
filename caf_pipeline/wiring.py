"""Opens the ledger, stores, sources and run contexts by the settings, and the archive for programs.

Each function imports what it opens, so that a process loads nothing else. Other imports of this
module would slow every command down.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, Final, cast

from caf_pipeline.errors import (
    LedgerError,
    MnemonicRefused,
    SettingsError,
    StoreError,
    UsageError,
)
from caf_pipeline.waits import Waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from caf_pipeline.chunk_state import ChunkState
    from caf_pipeline.encryption.opening_reader import OpeningReader
    from caf_pipeline.ledger.ledger import Ledger
    from caf_pipeline.ledger.lookup import Lookup
    from caf_pipeline.ledger.records import LocationLookups
    from caf_pipeline.records import StoragePlanRow
    from caf_pipeline.retrieval.archive import Archive
    from caf_pipeline.retrieval.restore import RestoreTarget
    from caf_pipeline.run_context import Lazy, RunContext
    from caf_pipeline.settings import Settings
    from caf_pipeline.source.protocol import EventQueue, ObjectSource
    from caf_pipeline.store.jackal.write import JackalStore
    from caf_pipeline.store.protocol import ChunkReader, ChunkStore
    from caf_pipeline.system.processes import Holder
    from caf_pipeline.system.ranges import FileRanges
    from caf_pipeline.waits import Listener, Recorder, Work

BUCKET_SCHEME: Final = "s3://"


def open_lookup(settings: Settings, waits: Waits | None = None) -> Lookup:
    """Open look-ups in the ledger, and create missing tables.

    `waits` reports when the database does not answer, and while tables are created. Raises
    LedgerUnreachable, or LedgerError if the database cannot be used. No message has the password.
    """
    from caf_pipeline.ledger.database import database_of, waiting_for_database
    from caf_pipeline.ledger.lookup import Lookup

    waits = waits or Waits()
    with waiting_for_database(settings, waits):
        lookup = Lookup(database_of(settings))
        lookup.bring_up(waits)
    return lookup


def open_ledger(settings: Settings, waits: Waits | None = None) -> Ledger:
    """Open the ledger, and create missing tables.

    `waits` reports when the database does not answer, and while tables are created. Raises
    LedgerUnreachable, or LedgerError if the database cannot be used. No message has the password.
    """
    from caf_pipeline.ledger.database import database_of, waiting_for_database
    from caf_pipeline.ledger.ledger import Ledger

    waits = waits or Waits()
    with contextlib.ExitStack() as opened:
        with waiting_for_database(settings, waits):
            ledger = Ledger(database_of(settings), store=settings.store.kind)
            opened.callback(ledger.close)
            ledger.bring_up(waits)
        opened.pop_all()
    return ledger


def open_reader(
    settings: Settings,
    lookup: Lookup,
    waits: Waits | None = None,
    *,
    ask_passphrase: Callable[[], str] | None = None,
) -> OpeningReader:
    """Return a reader of the configured store's chunks, which opens encrypted ones.

    It has no wallet. `ask_passphrase` is for an identity file that needs it.
    """
    from caf_pipeline.encryption.opening_reader import OpeningReader

    stored = _open_stored(settings, lookup, waits)
    return OpeningReader(
        stored, lookup.chunk_header, settings.encryption, ask_passphrase=ask_passphrase
    )


def _open_stored(settings: Settings, lookup: Lookup, waits: Waits | None) -> ChunkReader:
    if settings.store.kind == "jackal":
        from caf_pipeline.store.jackal.read import open_jackal_reader

        return open_jackal_reader(
            settings.jackal, lookup.seen_height, lookup.provider_records, waits
        )
    from caf_pipeline.store.directory import DirectoryReader

    return DirectoryReader(settings.store.folder, lookup.folder_store)


def open_archive(settings: Settings | None = None) -> Archive:
    """Open the archive for other programs, with the settings of `caf` by default.

    Raises:
        SettingsError: A setting is wrong, or there is no caf.toml.
        LedgerUnreachable: The database does not answer.
        LedgerError: The database cannot be used.
        TypeError: `settings` is something else, such as a path.
    """
    from caf_pipeline.retrieval.archive import Archive
    from caf_pipeline.settings import Settings, load_settings

    if settings is None:
        settings = load_settings()
    elif not isinstance(settings, Settings):
        raise TypeError(f"{settings!r}: use open_archive(load_settings(path)) to read a file")
    with contextlib.ExitStack() as opened:
        lookup = open_lookup(settings)
        opened.callback(lookup.close)
        store = open_reader(settings, lookup)
        opened.callback(store.close)
        return Archive(lookup, store, opened.pop_all().close)


def open_store(
    settings: Settings, ledger: Ledger, holder: Holder, waits: Waits | None = None
) -> ChunkStore:
    """Open the configured store."""
    if settings.store.kind == "jackal":
        return open_jackal(settings, ledger, holder, waits)
    from caf_pipeline.store.directory import DirectoryStore

    return DirectoryStore(settings.store.folder, ledger.folder_store)


def open_jackal(
    settings: Settings, ledger: Ledger, holder: Holder, waits: Waits | None = None
) -> JackalStore:
    """Open the store on Jackal.

    Raises:
        SettingsError: Another store is configured, or settings of the network are missing.
    """
    from caf_pipeline.store.jackal.write import open_jackal_store
    from caf_pipeline.throttle import open_throttle

    _require_jackal(settings)
    throttle = open_throttle(settings.jackal, ledger.controls.current, waits)
    return open_jackal_store(
        settings.jackal, ledger.transactions(holder), ledger.providers, throttle, waits
    )


def jackal_of(context: RunContext) -> JackalStore:
    """Return the run context's store with its Jackal type.

    Raises:
        SettingsError: Another store is configured.
    """
    _require_jackal(context.settings)
    return cast("JackalStore", context.store)


def read_space(ledger: Ledger, store: JackalStore, *, bought: bool = False) -> StoragePlanRow:
    """Read the wallet's plan and coins from the chain, and record them.

    `bought`: a purchase of this process has just set the plan's end.
    """
    address, account = store.wallet.address, store.poster.account
    plan, now = store.chain.confirmed_plan(address)
    ledger.storage_plans.record(
        account,
        read_at=now,
        balance=store.chain.balance(address),
        plan=None if plan is None else (plan.space_bytes, plan.used_bytes, plan.ends_at),
        starts_at=None if plan is None else plan.starts_at,
        bought=bought,
    )
    reading = ledger.storage_plans.last(account)
    assert reading
    return reading


def record_space(settings: Settings, ledger: Ledger, store: ChunkStore) -> StoragePlanRow | None:
    """Like `read_space`, for commands that need the chain for something else.

    Returns None without Jackal or a wallet, or if the chain does not answer.
    """
    if settings.store.kind != "jackal":
        return None
    with contextlib.suppress(StoreError, MnemonicRefused):
        return read_space(ledger, cast("JackalStore", store))
    return None


def _require_jackal(settings: Settings) -> None:
    if settings.store.kind != "jackal":
        raise SettingsError(
            f"store.kind is '{settings.store.kind}', so no chunk is on Jackal",
            hint='set store.kind = "jackal" in caf.toml; \'caf help '
            "docs/how-to/connect-jackal.md' has the other steps",
        )


@contextlib.contextmanager
def open_restore(
    lookup: LocationLookups,
    store: OpeningReader,
    source: str,
    destination: str,
    *,
    force: bool = False,
    dry_run: bool = False,
    profile: str = "",
    endpoint_url: str = "",
    waits: Waits | None = None,
) -> Iterator[RestoreTarget]:
    """Open the target of a restore while the context lasts.

    `destination` is a folder or `s3://BUCKET/PREFIX`. `force` replaces existing objects that
    differ, `dry_run` writes nothing. `profile` and `endpoint_url` are for a bucket; "": as the AWS
    tools choose.

    Raises:
        UsageError: `destination` is neither a folder nor an S3 address.
        SettingsError: The bucket's address or profile is wrong.
        IdentityMissing: The source has encrypted chunks, and this process has no identity.
        StagingError: The folder cannot be written.
        HeldByOther: Another process restores into the folder.
    """
    from pathlib import Path

    from caf_pipeline.retrieval.restore_folder import RestoreFolder
    from caf_pipeline.system.files_below import FilesBelow, is_folder

    if not destination:
        raise UsageError(
            "the target of the restore is empty",
            hint="pass a folder ('.' is the working directory), or s3://BUCKET/PREFIX",
        )
    if not dry_run and lookup.encrypted_chunk(source):
        store.identities()  # raises if there are none
    with contextlib.ExitStack() as stack:
        if not destination.startswith(BUCKET_SCHEME):
            # This is more likely a mistake than the name of a folder.
            if address := re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", destination):
                raise UsageError(
                    f"{destination!r} looks like a URL, and only s3:// is supported",
                    hint=f"pass s3://BUCKET/PREFIX, or './{address[0]}…' for a folder",
                )
            folder = Path(destination)
            exists = not dry_run or is_folder(folder)
            files = stack.enter_context(FilesBelow(folder, force=force)) if exists else None
            if files and not dry_run:
                files.own()
            yield RestoreFolder(files, store, force=force, dry_run=dry_run)
            return
        from caf_pipeline.retrieval.restore_bucket import RestoreBucket
        from caf_pipeline.source.s3.target import open_bucket_target

        bucket = stack.enter_context(
            contextlib.closing(
                open_bucket_target(
                    destination, profile=profile, endpoint_url=endpoint_url, waits=waits or Waits()
                )
            )
        )
        yield RestoreBucket(bucket, store, lookup, force=force, dry_run=dry_run)


def open_file(address: str) -> FileRanges:
    """Open a local or remote file; see `system.ranges.open_ranges`."""
    from caf_pipeline.system.ranges import open_ranges

    def open_s3(address: str) -> FileRanges:
        from caf_pipeline.source.s3.ranges import S3File

        return S3File(address)

    return open_ranges(address, open_s3)


def open_source(settings: Settings, source: str, waits: Waits, client: Any = None) -> ObjectSource:  # noqa: ANN401
    """Open an S3 source by name, with its own boto3 client unless `client` is passed."""
    from caf_pipeline.source.s3.source import open_s3_source

    packing = settings.packing
    return open_s3_source(
        source,
        settings.source(source),
        attempts=packing.request_attempts,
        connections=packing.max_requests,
        client=client,
        waits=waits,
    )


def open_queue(settings: Settings, source: str) -> EventQueue:
    """Open the queue of a source's event notifications."""
    from caf_pipeline.source.s3.queue import open_event_queue

    return open_event_queue(source, settings.source(source))


def open_run_context(
    settings: Settings,
    source: str,
    *,
    run: str,
    ledger: Ledger | None = None,
    store: Callable[[Ledger, Holder, Waits], ChunkStore] | None = None,
    client: Any = None,  # noqa: ANN401 - boto3's clients have no static type
    objects: ObjectSource | None = None,
    ended: Callable[[ChunkState], None] | None = None,
    waiting: Listener | None = None,
    register: bool = True,
) -> RunContext:
    """Return the run context of a source. The caller closes it, but not a passed `ledger`.

    Store and objects are opened at first use. `store` replaces `open_store`; with `objects`, S3 is
    not used. `run` is an id, e.g. of Dagster. `waiting` receives the waits, which the ledger
    records, too. `register` adds the source to the ledger. For `ended` see `RunContext`.
    """
    from caf_pipeline.ledger.ledger import Ledger
    from caf_pipeline.run_context import Lazy, RunContext
    from caf_pipeline.system.processes import this_process
    from caf_pipeline.throttle import open_throttle

    holder = this_process(run)
    lazy_ledger = Lazy.of(ledger) if ledger else Lazy(lambda: open_ledger(settings), Ledger.close)
    waits = Waits(*([waiting] if waiting else []), record=_recorder(lazy_ledger, holder, source))
    context = RunContext(
        source=source,
        settings=settings,
        holder=holder,
        lazy_objects=(
            Lazy.of(objects)
            if objects
            else Lazy(lambda: open_source(settings, source, waits, client))
        ),
        lazy_store=(
            Lazy(lambda: store(lazy_ledger.get(), holder, waits))
            if store
            else Lazy(
                lambda: open_store(settings, lazy_ledger.get(), holder, waits),
                lambda chunk_store: chunk_store.close(),
            )
        ),
        lazy_ledger=lazy_ledger,
        throttle=open_throttle(
            settings.jackal,
            lambda: lazy_ledger.get().controls.current(),  # noqa: PLW0108 - opened late
            waits,
        ),
        waits=waits,
        **({"ended": ended} if ended else {}),
    )
    if register:
        context.ledger.sources.register(source, context.address)
    return context


def _recorder(ledger: Lazy[Ledger], holder: Holder, source: str) -> Recorder:
    def record(work: Work) -> bool:
        # The work itself fails with this error if it needs the ledger.
        with contextlib.suppress(LedgerError):
            ledger.get().progress.record(holder, source, work)
            return True
        return False

    return record
