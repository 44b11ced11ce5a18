"""Commands on the archive itself: run, get, status, and what an operator does with a chunk."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from caf_pipeline.chunk_state import IN_GOOD_STANDING, ChunkState
from caf_pipeline.cli.listing import AsOfOption, parse_time
from caf_pipeline.cli.opening import known_sources, load_settings, opened_archive, opened_ledger, opened_workplace
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourceArgument,
    a_path,
    counted,
    note,
    print_json,
    printable,
    show_size,
    show_time,
    write_bytes,
)
from caf_pipeline.errors import UsageError
from caf_pipeline.inventory.objects import SkipReason, versions_as_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from caf_pipeline.ledger.records import Chunk, Location, RunWait, SourceAccount

CHUNKS_SHOWN: Final = 50  # of a source, on a terminal; more is what --all is for

ChunkArgument = Annotated[str, typer.Argument(metavar="CHUNK", help="A chunk's id, as `caf status` shows it.")]


def run(  # noqa: PLR0917 - the command line's options
    sources: Annotated[
        list[str] | None, typer.Option("--source", metavar="NAME", help="The source to archive; all of caf.toml by default.")
    ] = None,
    second_copy: Annotated[
        bool, typer.Option("--second-copy", help="Archive and pay also where the store may have the source already.")
    ] = False,
    report: Annotated[
        str, typer.Option("--report", metavar="DATE", help="Take the newest S3 Inventory report of this day, e.g. 2026-11-21.")
    ] = "",
    list_bucket: Annotated[bool, typer.Option("--list", help="List the bucket, although the source has reports.")] = False,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=0, help="Archive N chunks at a time; 0 chooses by their sizes.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON object that sums it up, on standard output.")] = False,
) -> int:
    r"""Take an inventory, plan what is new, and archive it.

    Runs through Dagster, in this process; each run is on its job's page in the UI. What an earlier run left unfinished
    is finished, too. Whatever it waits for is said at once, with what ends the wait; without a terminal a line says every
    minute how far it is. A chunk that fails lets the others go on; after the same permanent error on three chunks the rest
    is not tried. Ctrl-C ends it; the same command goes on where it stopped.

    Where the ledger has nothing of a source, e.g. in an empty home, the store is asked first. Where it lists files that may hold
    the source's objects, nothing is planned: `caf rebuild` restores them into the ledger. --second-copy, with --source, archives
    all of it once more.

    Of N chunks at a time, N - 1 are packed while another is sent, each by a process of its own; each takes its room in staging.
    Where there is no room for two, one follows the other. By default it is 2, and 1 where the chunks are small.

    A source with the setting `inventory` is not listed: its newest complete S3 Inventory report is taken. --report, with
    --source, takes that of another day; --list lists the bucket.

    \b
    Examples:
      caf run --source demo
      caf run --source demo --second-copy
      caf run --json | jq '.sources[] | select(.exit_status != 0)'

    Exit status: 0 everything that the inventory found is located, or skipped as unsupported_key or too_large. Else the first
    that applies, of all sources: 12 chunks failed; 13 other live runs hold what is missing; 14 objects are to be tried again:
    skipped for another reason, claimed by a chunk that is not archived yet, or not planned yet; 15 all others are located, and
    some wait until a chunk of min_chunk_size can be filled, or max_wait is over; 18 everything is located, and chunks are
    damaged, which `caf jackal repair` mends. Before any chunk is tried, or where nothing can go on: 1 an inventory or a plan
    failed by a fault of its own; 2 an option is for one source, or excludes another; 3 a setting is wrong; 5 the source, 6 the
    database or 7 the store failed, or the store may have the source already; 8 the disk under home failed; 9 a plan or an
    inventory is damaged. 130 interrupted.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415  takes longer to load than most commands

    settings = load_settings()
    source = sources[0] if sources else None
    if sources and len(sources) > 1:
        raise UsageError("--source names one source.", hint="Leave it out for all of caf.toml, or run the command for each.")
    if source is not None:
        settings.source(source)
    elif second_copy or report:
        raise UsageError(f"{'--second-copy' if second_copy else '--report'} is for one source.", hint="Name it with --source.")
    if report and list_bucket:
        raise UsageError("--report and --list exclude each other.", hint="Give one of them.")
    (entry,) = entry_points(group="caf_pipeline.commands", name="run")
    inventory = {"report": report, "list_bucket": list_bucket}
    options = {"second_copy": second_copy, "inventory": inventory, "workers": workers}
    status: int = entry.load()(source, settings=settings, **options, json=json)
    return status


def get(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The object's key in S3, prefix included.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", parser=a_path, metavar="FILE", help="Write to FILE instead of standard output."),
    ] = None,
    version: Annotated[
        str | None, typer.Option("--object-version", metavar="V", help="A version id, instead of the current one.")
    ] = None,
    as_of: AsOfOption = None,
    member: Annotated[
        str | None, typer.Option("--member", metavar="NAME", help="One file of the object, which is a .tar.co.")
    ] = None,
) -> None:
    r"""Fetch one archived object.

    It takes one look-up and one range read, and its SHA-256 is compared. Nothing is given out before the whole object was read
    and verified: neither FILE nor a byte on standard output. A provider that gives wrong bytes is left for the next one that
    has the object; where one breaks off, the next goes on at the same byte. A FILE that is there is replaced; where it is a
    link, what it leads to. A pipe or a device is written to, as standard output is.

    What is given is what S3 had at the last inventory. Where that is gone, under way or skipped, the content archived last is
    given, and a line on standard error says so. Of a key that is not archived it says why: a chunk under way has it, it was
    skipped, or its chunk is lost.

    With --as-of it is what is archived of the key that was last modified latest up to TIME, or that an inventory up to TIME found
    current; a line on standard error says where it is known that S3 had something else then, or nothing.

    With --member the object is a tar archive with its cotar index, and one file of it is given. Of an object of more than 8 MiB
    only the index and that file are read, and compared with the tar's own header; such a part has no SHA-256.

    \b
    Examples:
      caf get demo packages/rich/py.typed -o py.typed
      caf get demo python/python3.11/this.py | python3
      caf get demo report.csv --as-of 2026-11-21T10:00 -o report.csv
      caf get demo tiles.tar.co --member 12/4038/2564.pbf > tile.pbf

    Exit status: 0 verified; 2 FILE cannot be written, or TIME is not a time; 3 a setting is wrong or there is no such source;
    4 the object has no cotar index or no such file; 6 the database or 7 the store failed; 9 all that is to be had has other
    bytes; 11 the object, or this version of it, is not archived.
    """
    from caf_pipeline.retrieval.reader import fetch, save, write_whole  # noqa: PLC0415  loaded by the commands that use it

    moment = None if as_of is None else parse_time(as_of)
    settings = load_settings()
    with opened_ledger(settings) as ledger, opened_archive(settings, ledger, source) as store:
        found = fetch(ledger, store, source, key, version, as_of=moment)
        if said := _not_current(key, found.location):
            note(said)
        if member is not None:
            from caf_pipeline.cli.cotar import opened_cotar  # noqa: PLC0415  likewise
            from caf_pipeline.retrieval.object_ranges import ObjectRanges  # noqa: PLC0415

            with opened_cotar(ObjectRanges(found)) as tar:
                pieces = tar.pieces(os.fsencode(member))
                if output:
                    write_whole(output, lambda file: file.writelines(pieces))
                    return
                write_bytes(pieces)
        elif output:
            save(found, output)
        else:
            write_bytes(found.pieces)


def status(
    source: Annotated[str | None, typer.Argument(metavar="[SOURCE]", help="One source; all by default.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every chunk, however many there are.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Say how far it is, again and again; Ctrl-C ends it.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=86_400, help="Between two looks of --watch.")
    ] = 5,
    json: JsonOption = False,
) -> None:
    r"""Show sources and chunks as the ledger has them.

    Located objects are current, older (S3 has other content of the key) or gone, by the last whole inventory that was planned.
    What that inventory had beside them is shown with its time: objects that a filter left out, older versions, delete markers.

    It also shows what live runs wait for, and what ends each wait. Works also while S3 and the store are away. With
    --json a line is {"source": …} or {"chunk": …}.

    --watch says instead how many chunks, bytes and objects are located, at which rate, and how long the chunks under way take
    at that rate. The rate is that of the chunks located in the last hour, from the first of them until now: "no rate yet" while
    there are fewer than two. On a terminal the lines are replaced, elsewhere each look prints a line a source; with --json an
    object.

    \b
    Examples:
      caf status
      caf status demo --json | jq 'select(.state == "parked")'
      caf status demo --watch --interval 60 >> progress.log

    Exit status: 0; 3 a setting is wrong or there is no such source; 6 the database failed; 130 interrupted, which ends --watch.
    """
    settings = load_settings()
    if watch:
        from caf_pipeline.cli.watch import watch as watch_sources  # noqa: PLC0415  loaded by the command that uses it

        watch_sources(settings, source, interval=interval, json=json)
    with opened_ledger(settings) as ledger:
        known = known_sources(settings, ledger)
        if source is not None and source not in known:
            settings.source(source)
        paused = ledger.controls().orders().paused
        if paused and not json:
            typer.echo(f"paused: {printable(paused)} ('caf jackal resume' ends it)")
        for name in [source] if source else known:
            registered = name in ledger.sources()
            account = ledger.account(name) if registered else None
            chunks = ledger.chunks(source=name) if registered else ()
            waits = [wait for wait in ledger.waits() if wait.source == name]
            noticed, apart = ledger.count_noticed([name]).get(name, (0, 0))
            if json:
                beside = {"paused": paused or None, "noticed_keys": noticed, "messages_set_apart": apart}
                _print_status_json(name, account, list(chunks), waits, beside)
                continue
            _print_status(name, account, list(chunks), waits, everything)
            if noticed or apart:
                said = f"{name}: events name {counted(noticed, 'key')} that no inventory has listed since"
                typer.echo(f"{said}; {counted(apart, 'message')} of its queue set apart" if apart else said)


def unpark(chunk: ChunkArgument) -> None:
    r"""Let runs work on a parked chunk again.

    Do so once what stopped it is mended.

    Exit status: 0; 6 the chunk is not parked, or the database failed; 10 a run works on it; 11 there is no such chunk.
    """
    from caf_pipeline.steps import chunk_steps  # noqa: PLC0415  loaded by the commands that use it

    settings = load_settings()
    with opened_ledger(settings) as ledger, opened_workplace(settings, ledger, ledger.chunk(chunk).source) as work:
        typer.echo(f"{chunk} is '{chunk_steps.unpark(work, chunk).state}'; the next run goes on with it")


def withdraw(chunk: ChunkArgument) -> None:
    r"""Give up a chunk that is not posted yet, or one that is damaged beyond repair.

    The next plan takes its objects again, as far as S3 still has them.

    Exit status: 0; 6 the chunk is posted and not damaged, its post may still be included, or the database failed; 10 a run works
    on it; 11 there is no such chunk.
    """
    from caf_pipeline.steps import chunk_steps  # noqa: PLC0415  loaded by the commands that use it

    settings = load_settings()
    with opened_ledger(settings) as ledger, opened_workplace(settings, ledger, ledger.chunk(chunk).source) as work:
        chunk_steps.withdraw(work, chunk)
        typer.echo(f"{chunk} is withdrawn; its objects are planned again by the next plan")


def _not_current(key: str, location: "Location") -> str:
    """Return a warning where the object is known not to be what S3 has, or had at the time that was asked for; "" else."""
    known = location.currency
    if known is None or known.is_current:
        return ""
    written = f"this is its content of {show_time(location.row.last_modified)}"
    if known.gone_at:
        seen = f", an inventory last listed it on {show_time(known.last_seen)}" if known.last_seen else ""
        gone = f"was gone from S3 at {show_time(known.as_of)}" if known.as_of else "is gone from S3"
        return f"'{printable(key)}' {gone}{seen}; {written}"
    other = f"had other content in S3 at {show_time(known.as_of)}" if known.as_of else "has other content in S3 now"
    if known.chunk:
        return f"'{printable(key)}' {other}, which chunk {known.chunk} ({known.state}) archives; {written}"
    why = f"was skipped ({known.state})" if known.state else "is not archived"
    if known.state == SkipReason.WAITING:
        why = "waits to be planned"
    return f"'{printable(key)}' {other}, which {why}; {written}"


def _print_status_json(
    name: str,
    account: "SourceAccount | None",
    chunks: "list[Chunk]",
    waits: "Sequence[RunWait]",
    beside: "Mapping[str, int | str | None]",
) -> None:
    content = account.content if account else None
    print_json(
        {
            "source": name,
            "located_objects": account.located_objects if account else 0,
            "current_objects": content.current_objects if content else None,
            "older_objects": content.older_objects if content else None,
            "gone_objects": content.gone_objects if content else None,
            "uncounted_objects": content.uncounted_objects if content else None,
            "left_out": content.left_out if content else None,
            **(versions_as_json(content.beside, all_versions=content.all_versions) if content else {}),
            "inventory_taken_at": content.taken_at.isoformat() if content else None,
            "located_bytes": account.located_bytes if account else 0,
            "claimed_objects": account.claimed_objects if account else 0,
            "skipped": {str(reason): count for reason, count in account.skipped.items()} if account else {},
            "waiting_objects": account.waiting.as_json() if account and account.waiting else None,
            "chunks": {str(state): count for state, count in account.chunks.items()} if account else {},
            **beside,
            "waiting": [
                {
                    "run": one.run,
                    "chunk": one.wait.chunk or None,
                    "for": one.wait.what,
                    "since": one.wait.since.isoformat(),
                    "ends_by": one.wait.ends_by,
                }
                for one in waits
            ],
        }
    )
    for chunk in chunks:
        print_json(
            {
                "chunk": chunk.name,
                "source": chunk.source,
                "state": str(chunk.state),
                "objects": chunk.member_count or chunk.object_count,
                "skipped": chunk.skipped_count,
                "size_bytes": chunk.caf_size_bytes or chunk.expected_size_bytes,
                "merkle_root": chunk.merkle_root.hex() if chunk.merkle_root else None,
                "reason": chunk.reason or None,
            }
        )


def _print_status(
    name: str, account: "SourceAccount | None", chunks: "list[Chunk]", waits: "Sequence[RunWait]", everything: bool
) -> None:
    from rich.console import Console  # noqa: PLC0415  only where a table is shown
    from rich.table import Table  # noqa: PLC0415

    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(_sentence(name, account))
    for one in waits:
        console.print(f"run {printable(one.run)}: {printable(one.wait.sentence)}")
    if not chunks:
        return
    chunks.sort(key=lambda chunk: (_urgency(chunk.state), -chunk.updated_at.timestamp()))
    shown = chunks if everything else chunks[:CHUNKS_SHOWN]
    table = Table(box=None, pad_edge=False)
    table.add_column("chunk", no_wrap=True, min_width=max(len(chunk.name) for chunk in shown))  # it is what one copies
    table.add_column("state")
    for column in ("objects", "skipped", "size"):
        table.add_column(column, justify="right")
    table.add_column("Merkle root")
    for chunk in shown:
        table.add_row(
            chunk.name,
            str(chunk.state),
            f"{chunk.member_count or chunk.object_count:,}",
            f"{chunk.skipped_count:,}",
            show_size(chunk.caf_size_bytes or chunk.expected_size_bytes),
            f"{chunk.merkle_root.hex()[:16]}…" if chunk.merkle_root else "",
        )
    console.print(table)
    for chunk in shown:
        if chunk.reason:
            console.print(f"{chunk.name} is {chunk.state}: {printable(chunk.reason)}")
    if len(shown) < len(chunks):
        console.print(f"… and {len(chunks) - len(shown)} more: caf status {name} --all")


def _urgency(state: ChunkState) -> int:
    """Return what a chunk is sorted by: damage first, then what is not done yet, of each the latest."""
    if state is ChunkState.DAMAGED:
        return 0
    return 2 if state in (*IN_GOOD_STANDING, ChunkState.EMPTY) else 1


def _sentence(name: str, account: "SourceAccount | None") -> str:
    if account is None:
        return f"{name}: nothing planned yet"
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(account.skipped.items()) if count)
    content, size = account.content, show_size(account.located_bytes)
    located = f"{account.located_objects:,} located ({size}), of no inventory that was counted yet"
    if content:
        counts = f"{content.current_objects:,} current, {content.older_objects:,} older, {content.gone_objects:,} gone"
        counts += f", {content.uncounted_objects:,} located since" if content.uncounted_objects else ""
        located = f"{counts}, by the inventory of {show_time(content.taken_at)} ({size} located)"
        left_out = ", ".join(f"{count:,} by {name}" for name, count in (content.left_out or {}).items())
        located += f"; left out of it: {left_out}" if left_out else ""
        beside = content.beside.sentence(all_versions=content.all_versions) if content.beside else ""
        located += f"; it has {beside}" if beside else ""
    waiting = account.waiting
    waits = f"; {waiting.objects:,} wait for more, at most until {show_time(waiting.until)}" if waiting else ""
    return f"{name}: {located}; {account.claimed_objects:,} claimed{waits}; skipped: {skipped or 'none'}"
