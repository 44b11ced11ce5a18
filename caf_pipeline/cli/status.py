"""`caf status`."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from caf_pipeline.chunk_state import IN_GOOD_STANDING, ChunkState
from caf_pipeline.cli.opening import known_sources, opened_ledger
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourcesArgument,
    counted,
    print_json,
    printable,
    show_coins,
    show_size,
    show_time,
)
from caf_pipeline.inventory.objects import versions_as_json
from caf_pipeline.ledger.records import SourceAccount
from caf_pipeline.records import Chunk
from caf_pipeline.settings import load_settings
from caf_pipeline.store.jackal.storage_forecast import end_warning
from caf_pipeline.system.quantities import show_age, table_lines
from caf_pipeline.waits import Wait

CHUNKS_SHOWN: Final = 50  # of a source, without --all


def status(
    source: SourcesArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every chunk.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show progress repeatedly until Ctrl-C.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.1,
            max=86_400,
            help="Time between two updates of --watch.",
        ),
    ] = 5,
    json: JsonOption = False,
) -> None:
    r"""Show sources and chunks as the ledger has them.

    Located objects are current, gone from S3, or older than the content in S3, by the last complete
    inventory that was planned. Also shows what it left out by filters, its older versions and
    delete markers, and what live runs wait for. Needs neither S3 nor the store. --json prints lines
    {"source": …} and {"chunk": …}.

    --watch shows located chunks, bytes and objects, what live runs have packed and sent, the rate,
    and the remaining time. The rate covers the last hour, and needs two located chunks. Each update
    prints a line for each source if there is no terminal, or a JSON object with --json.

    \b
    Examples:
      caf status demo --json | jq 'select(.state == "parked")'
      caf status demo --watch --interval 60 >> progress.log

    \b
    Exit status: 0, 3, 6
      130, 143, 129: --watch was ended by Ctrl-C, SIGTERM, or SIGHUP.
    """
    settings = load_settings()
    if watch:
        from caf_pipeline.cli.watch import watch as watch_sources  # noqa: PLC0415  only for --watch

        watch_sources(settings, source, interval=interval, json=json)
    with opened_ledger(settings) as ledger:
        names = known_sources(settings, ledger.lookup)
        if source is not None and source not in names:
            settings.source(source)
        paused = ledger.controls.current().paused
        if paused and not json:
            typer.echo(f"paused: {printable(paused)} ('caf resume' ends it)")
        plans = ledger.storage_plans.list()
        now = max([datetime.now(UTC), *(row.read_at for row in plans)])  # of the chain's clock
        for row in () if json else plans:
            space = "no space bought"
            if row.ends_at is not None:
                space = (
                    f"{show_size(row.used_bytes or 0)} of {show_size(row.space_bytes or 0)} "
                    f"used, ends {show_time(row.ends_at)}"
                )
            balance = f"balance {show_coins(row.balance)}"
            read = f"read {show_time(row.read_at)}, {show_age(now - row.read_at)}"
            typer.echo(f"{row.account}: {space}, {balance}, {read}")
            if warning := end_warning(row, now, settings.jackal.warn_days):
                typer.echo(f"{row.account}: {warning}")
        if not plans and not json and settings.store.kind == "jackal":
            typer.echo("the bought space was never read: caf jackal wallet")
        foreign = ledger.progress.foreign_use()
        if foreign and foreign.sentence and not json:
            typer.echo(f"{foreign.account}: {foreign.sentence}; 'caf doctor' looks for archives")
        for name in [source] if source else names:
            registered = name in ledger.lookup.sources()
            account = ledger.chunks.account(name) if registered else None
            chunks = [*ledger.chunks.list(source=name)] if registered else []
            waits = [
                (item.holder.run, wait)
                for item in ledger.progress.live()
                if item.source == name
                for wait in item.work.waits
            ]
            noticed, apart = ledger.notices.count_noticed([name]).get(name, (0, 0))
            if json:
                shared = {
                    "paused": paused or None,
                    "noticed_keys": noticed,
                    "messages_set_apart": apart,
                    "foreign_transactions": foreign.transactions if foreign else 0,
                    "unknown_archives": foreign.archives if foreign else [],
                    "space": [
                        {
                            "account": row.account,
                            "space_bytes": row.space_bytes,
                            "used_bytes": row.used_bytes,
                            "ends_at": row.ends_at,
                            "latest_end": row.latest_end,
                            "balance_ujkl": row.balance,
                            "read_at": row.read_at,
                            "warning": end_warning(row, now, settings.jackal.warn_days) or None,
                        }
                        for row in plans
                    ],
                }
                _print_status_json(name, account, chunks, waits, shared)
                continue
            _print_status(name, account, chunks, waits, everything)
            if noticed or apart:
                messages = f"; {counted(apart, 'message')} of its queue set apart" if apart else ""
                typer.echo(
                    f"{name}: events name {counted(noticed, 'key')} that no inventory has listed "
                    f"since{messages}"
                )


def _print_status_json(
    name: str,
    account: SourceAccount | None,
    chunks: list[Chunk],
    waits: Sequence[tuple[str, Wait]],
    shared: Mapping[str, object],
) -> None:
    content = account.content if account else None
    print_json(
        source=name,
        located_objects=account.located_objects if account else 0,
        current_objects=content.current_objects if content else None,
        older_objects=content.older_objects if content else None,
        gone_objects=content.gone_objects if content else None,
        uncounted_objects=content.uncounted_objects if content else None,
        left_out=content.left_out if content else None,
        **(versions_as_json(content.beside, all_versions=content.all_versions) if content else {}),
        inventory_taken_at=content.taken_at if content else None,
        located_bytes=account.located_bytes if account else 0,
        claimed_objects=account.claimed_objects if account else 0,
        skipped=account.skipped if account else {},
        waiting_objects=account.waiting.as_json() if account and account.waiting else None,
        chunks=account.chunks if account else {},
        **shared,
        waiting=[
            {
                "run": run,
                "chunk": wait.chunk or None,
                "for": wait.what,
                "since": wait.since,
                "ends_by": wait.ends_by,
            }
            for run, wait in waits
        ],
    )
    for chunk in chunks:
        print_json(
            chunk=chunk.name,
            source=chunk.source,
            state=chunk.state,
            objects=_objects(chunk),
            skipped=chunk.skipped_count,
            size_bytes=chunk.caf_size_bytes or chunk.expected_size_bytes,
            merkle_root=chunk.merkle_root,
            reason=chunk.reason or None,
        )


def _print_status(
    name: str,
    account: SourceAccount | None,
    chunks: list[Chunk],
    waits: Sequence[tuple[str, Wait]],
    everything: bool,
) -> None:
    typer.echo(_sentence(name, account))
    for run, wait in waits:
        typer.echo(f"run {printable(run)}: {printable(wait.sentence)}")
    if not chunks:
        return
    finished = (*IN_GOOD_STANDING, ChunkState.EMPTY)
    # Damaged chunks come first, then unfinished ones; the latest first.
    chunks.sort(
        key=lambda chunk: (
            chunk.state is not ChunkState.DAMAGED,
            chunk.state in finished,
            -chunk.updated_at.timestamp(),
        )
    )
    shown = chunks if everything else chunks[:CHUNKS_SHOWN]
    rows = (
        (
            chunk.name,
            chunk.state,
            f"{_objects(chunk):,}",
            f"{chunk.skipped_count:,}",
            show_size(chunk.caf_size_bytes or chunk.expected_size_bytes),
            f"{chunk.merkle_root.hex()[:16]}…" if chunk.merkle_root else "",
        )
        for chunk in shown
    )
    names = ("chunk", "state", "objects", "skipped", "size", "Merkle root")
    for line in table_lines(names, rows, right=names[2:5]):
        typer.echo(line)
    for chunk in shown:
        if chunk.reason:
            typer.echo(f"{chunk.name} is {chunk.state}: {printable(chunk.reason)}")
    if len(shown) < len(chunks):
        typer.echo(f"… and {len(chunks) - len(shown)} more: caf status {name} --all")


def _objects(chunk: Chunk) -> int:
    return chunk.member_count if chunk.was_sealed else chunk.object_count


def _sentence(name: str, account: SourceAccount | None) -> str:
    if account is None:
        return f"{name}: nothing planned yet"
    content, size = account.content, show_size(account.located_bytes)
    if content is None:
        line = f"{account.located_objects:,} located ({size}), no inventory counted yet"
    else:
        line = (
            f"{content.current_objects:,} current, {content.older_objects:,} older, "
            f"{content.gone_objects:,} gone"
        )
        if content.uncounted_objects:
            line += f", {content.uncounted_objects:,} located since and not counted yet"
        line += f", by the inventory of {show_time(content.taken_at)} ({size} located)"
        left_out = (content.left_out or {}).items()
        if counts := ", ".join(f"{count:,} by {reason}" for reason, count in left_out):
            line += f"; left out of it: {counts}"
        if content.beside and (
            beside := content.beside.sentence(all_versions=content.all_versions)
        ):
            line += f"; it has {beside}"
    line += f"; {account.claimed_objects:,} claimed"
    if waiting := account.waiting:
        line += f"; {waiting.objects:,} wait for more, at most until {show_time(waiting.until)}"
    skipped = [f"{count:,} {reason}" for reason, count in sorted(account.skipped.items()) if count]
    return f"{name}: {line}; skipped: {', '.join(skipped) or 'none'}"
