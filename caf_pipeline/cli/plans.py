"""Commands on plans: what one would do and cost before it is made, and what those that were made
are.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.cli.opened_ledger import opened_ledger
from caf_pipeline.cli.opening import require_source
from caf_pipeline.cli.run_opening import opened_run_context
from caf_pipeline.cli.terminal import (
    JsonOption,
    ReportOption,
    SourceArgument,
    counted,
    note,
    print_json,
    printable,
    show_coins,
    show_size,
    show_time,
)
from caf_pipeline.errors import CafError, NotLocated, UsageError
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.inventory.plan import read_chunk_batches, read_terms, require_undamaged
from caf_pipeline.inventory.plan_statistics import PlanStatistics, histogram_lines, plan_statistics
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import Chunk, PlanRow
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.steps import inventories
from caf_pipeline.steps.preview import PlanEstimate, PlanPreview, preview_plan

SHOWN: Final = 50
"""Plans of a source, and chunks of a plan, on a terminal; `--json` has all."""

_USAGE: Final = "caf plans SOURCE, caf plans show PLAN, or caf plans chunk CHUNK"


def plan(
    source: SourceArgument,
    _dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Changes nothing: the command never plans.")
    ] = False,
    last_inventory: Annotated[
        bool,
        typer.Option(
            "--last-inventory", help="Use the latest whole inventory instead of taking one."
        ),
    ] = False,
    report: ReportOption = None,
    list_bucket: Annotated[
        bool, typer.Option("--list", help="List the bucket, although the source has reports.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    r"""Show what a plan of a source would do and cost.

    Takes an inventory as `caf run` does, unless --last-inventory is given, and cuts what no chunk
    has. The ledger learns nothing of it, and nothing is claimed; the inventory is kept like any
    other. Prices are estimates: for requests and egress what get_price and egress_price say, or,
    without an endpoint_url, AWS's list prices of S3 Standard in us-east-1; for the space what the
    chain asks now. The time is what it takes at the median rate of the source's last chunks.
    docs/explanation/planning.md has what each number assumes.

    \b
    Examples:
      caf plan demo
      caf plan demo --report 2026-11-21
      caf plan demo --json | jq '.chunks, .charged_bytes'

    Exit status: 0; 2 options exclude each other; 3 a setting is wrong or there is no such source; 5
    the source, 6 the database failed; 8 the disk under home failed; 9 the inventory is damaged; 11
    there is no inventory yet, or the last one has other versions than are to be archived now.
    """
    settings = load_settings()
    settings.source(source)
    chosen = {"--last-inventory": last_inventory, "--report": report, "--list": list_bucket}
    first, *more = [option for option, value in chosen.items() if value] or [""]
    if more:
        raise UsageError(f"{first} and {more[0]} exclude each other.", hint="Give one of them.")
    with (
        opened_ledger(settings) as ledger,
        opened_run_context(settings, ledger, source, register=False) as context,
    ):
        if last_inventory:
            snapshot = inventories.last_whole(
                context, hint="run it without --last-inventory: it takes an inventory then"
            )
        elif report or (context.source_settings.inventory and not list_bucket):
            snapshot, taken = inventories.take_report(context, report or "")
            if taken.warning:
                note(taken.warning)
        else:
            snapshot = inventories.take_inventory(context, to_plan=False)
        if warning := inventories.nothing_found(context, snapshot):
            note(warning)
        preview = preview_plan(context, snapshot)
    if json:
        print_json(preview.as_json())
    else:
        _print_preview(preview)


def plans(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE | show PLAN | chunk CHUNK", help="What is shown, see above."
        ),
    ],
    json: JsonOption = False,
) -> None:
    r"""List plans; show one plan, or one of its chunks.

    PLAN is the name of a plan, as the list has it, or SOURCE-PLAN where two sources have a plan of
    this name. CHUNK is a chunk's id. What was planned is read from the plan's files, what became of
    it from the ledger.

    \b
    Examples:
      caf plans demo
      caf plans show 2f20e129
      caf plans chunk demo-2f20e129-00006 --json

    Without the folder of its files, as after `caf rebuild`, what the ledger has of it is shown.

    Exit status: 0; 1 some of the plan's files are gone or damaged; 2 none of the three forms; 3 a
    setting is wrong or there is no such source; 6 the database failed; 11 there is no such plan or
    chunk.
    """
    settings = load_settings()
    with opened_ledger(settings) as ledger:
        if len(words) == 1:
            _list_plans(settings, ledger, words[0], json=json)
        elif len(words) == 2 and words[0] == "show":
            _show_plan(settings, ledger, words[1], json=json)
        elif len(words) == 2 and words[0] == "chunk":
            _show_chunk(ledger, words[1], json=json)
        else:
            raise UsageError(
                "caf plans takes a source, or 'show' and a plan, or 'chunk' and a chunk.",
                hint=_USAGE,
            )


# --- a preview
# ------------------------------------------------------------------------------------------


def _print_preview(preview: PlanPreview) -> None:
    snapshot, estimate = preview.snapshot, preview.estimate
    seen = estimate.statistics
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in preview.skipped.items())
    lines = {
        "inventory": f"{counted(snapshot.object_count, 'object')}, "
        f"{show_size(snapshot.object_bytes)}, {snapshot.name}",
        "report": f"{snapshot.report}, of {show_time(snapshot.taken_at)}, "
        f"{_age(snapshot.taken_at)} old"
        if snapshot.report
        else "",
        "versions": snapshot.beside.sentence(all_versions=snapshot.all_versions),
        "archived": f"{preview.located:,} located, {preview.claimed:,} in chunks under way",
        "planned": f"{counted(seen.objects, 'object')}, {show_size(seen.size_bytes)}",
        "split": _split(seen),
        "compared": f"{preview.to_compare:,} of them were written again; those with equal checksum "
        "and headers are left out"
        if preview.to_compare
        else "",
        "left out": ", ".join(f"{count:,} by {name}" for name, count in preview.left_out.items()),
        "skipped": skipped or "none",
        "waiting": f"{counted(preview.waiting.objects, 'object')}, "
        f"{show_size(preview.waiting.size_bytes)}, at most until"
        f" {show_time(preview.waiting.until)}"
        if preview.waiting
        else "",
        **_estimated(estimate),
        "plans": f"{_at_least(seen)}{preview.plans:,}, since one has at most 99,999 chunks"
        if preview.plans > 1
        else "",
        "last plan": _compared(preview),
        "warning": preview.warning,
    }
    _print_lines(lines)
    _print_objects(seen)
    at_aws = (
        ": AWS's list prices of S3 Standard in us-east-1 where none is set"
        if estimate.at_aws
        else ""
    )
    typer.echo(f"Prices and time are estimates, without retries{at_aws}.")
    typer.echo("Nothing was planned, and nothing claimed: caf run plans.")


def _age(moment: datetime) -> str:
    return _duration(
        max(0.0, (datetime.now(UTC) - moment).total_seconds())
    )  # S3's clock may be ahead of this machine's


def _split(seen: PlanStatistics) -> str:
    if not seen.split_objects:
        return ""
    return (
        f"{counted(seen.split_objects, 'object')} larger than a chunk, over "
        f"{counted(seen.parts, 'chunk')}, a part each"
    )


def _at_least(seen: PlanStatistics) -> str:
    """Say where plans may be more: the parts of an object are all in one plan, so that one may end
    with room left.
    """
    return "at least " if seen.split_objects > 1 else ""


def _estimated(estimate: PlanEstimate) -> dict[str, str]:
    storage, target = estimate.storage, show_size(estimate.target_bytes)
    priced = f" of {storage.priced_as}" if storage and storage.priced_as else ""
    return {
        "chunks": f"{estimate.chunks:,} of {target}, filled by {estimate.fill:.1%} with objects;"
        f" {show_size(estimate.expected_bytes)} with indexes and manifests"
        if estimate.chunks
        else "none",
        "requests": f"{estimate.requests:,} GETs and HEADs, "
        f"{_dollars(estimate.request_usd, 'get_price')}",
        "egress": f"{show_size(estimate.statistics.size_bytes)}, "
        f"{_dollars(estimate.egress_usd, 'egress_price')}"
        f"{', 0 within the bucket’s region' if estimate.egress_usd and estimate.at_aws else ''}",
        "storage": f"{show_size(storage.charged_bytes)}: {storage.copies} copies of "
        f"{show_size(estimate.expected_bytes)}"
        if storage
        else f"not known: {printable(estimate.storage_unknown)}"
        if estimate.storage_unknown
        else "the store charges nothing",
        "price": f"{show_coins(storage.price_ujkl)} for {storage.days} days{priced},"
        f" and at most {show_coins(storage.fees_ujkl)} of fees once;"
        f" the space is paid again every {storage.days} days, as long as the objects are to be kept"
        if storage
        else "",
        "time": f"about {_duration(estimate.seconds)}, at "
        f"{show_size(round(estimate.rate.bytes_per_second))}/s, the median of the"
        f" last {counted(estimate.rate.chunks, 'chunk')}"
        if estimate.rate and estimate.seconds is not None
        else "not known yet: too few chunks of this source were archived here to measure it",
    }


def _dollars(usd: float | None, setting: str) -> str:
    return f"price not known: set {setting}" if usd is None else f"about {usd:,.2f} USD"


def _duration(seconds: float) -> str:
    """Return a length of time in its largest fitting unit, to two digits or so: it is an
    estimate.
    """
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _compared(preview: PlanPreview) -> str:
    last = preview.difference
    if last is None:
        return "none yet"
    size = f"{'-' if last.size_bytes < 0 else '+'}{show_size(abs(last.size_bytes))}"
    return (
        f"{last.plan} of {show_time(last.planned_at)}; this one has {last.objects:+,} objects, "
        f"{size}, {last.chunks:+,} chunks"
    )


def _print_lines(lines: Mapping[str, str]) -> None:
    for name, text in lines.items():
        if text:
            typer.echo(f"{name:<10}{text}")


def _print_objects(seen: PlanStatistics) -> None:
    for name, (objects, size_bytes) in seen.storage_classes.items():
        typer.echo(
            f"{'class':<10}{printable(name)}: {counted(objects, 'object')}, {show_size(size_bytes)}"
        )
    for title, named in (("largest", seen.largest), ("smallest", seen.smallest)):
        for key, size_bytes in named:
            typer.echo(f"{title:<10}{show_size(size_bytes):>10}  {printable(key)}")
    for line in histogram_lines(seen.sizes):
        typer.echo(line)


# --- plans that were made
# ------------------------------------------------------------------------------------------


def _list_plans(settings: Settings, ledger: Ledger, source: str, *, json: bool) -> None:
    require_source(settings, ledger.lookup, source)
    found = ledger.plans.list(source)
    if json:
        for row in found:
            print_json(_plan_json(row))
        return
    if not found:
        typer.echo(f"{source}: nothing planned yet")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("plan", no_wrap=True)
    table.add_column("planned at", no_wrap=True)
    for column in ("objects", "size", "chunks"):
        table.add_column(column, justify="right")
    table.add_column("states")
    for row in found[:SHOWN]:
        size = show_size(row.record.object_bytes)
        chunks = f"{sum(row.chunks.values()):,}"
        when = show_time(row.created_at)
        table.add_row(
            row.record.name, when, f"{row.record.object_count:,}", size, chunks, _states(row.chunks)
        )
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(table)
    if len(found) > SHOWN:
        console.print(f"… and {len(found) - SHOWN} more: caf plans {source} --json")


def _plan_json(row: PlanRow) -> dict[str, object]:
    return {
        "plan": row.record.name,
        "source": row.record.source,
        "planned_at": row.created_at.isoformat(),
        "inventory": row.record.snapshot,
        "objects": row.record.object_count,
        "bytes": row.record.object_bytes,
        "chunks": {str(state): count for state, count in row.chunks.items()},
        "folder": row.record.folder,
    }


def _states(chunks: Mapping[ChunkState, int]) -> str:
    return ", ".join(f"{count:,} {state}" for state, count in chunks.items())


def _find_plan(ledger: Ledger, name: str) -> PlanRow:
    found = [
        row
        for row in ledger.plans.list()
        if name in (row.record.name, f"{row.record.source}-{row.record.name}")
    ]
    if not found:
        raise NotLocated(
            f"there is no plan {name}", hint="caf plans SOURCE lists the plans of a source"
        )
    if len(found) > 1:
        names = " or ".join(f"{row.record.source}-{row.record.name}" for row in found)
        raise UsageError(
            f"{len(found)} sources have a plan {name}.", hint=f"Name one of them: {names}."
        )
    return found[0]


def _show_plan(settings: Settings, ledger: Ledger, name: str, *, json: bool) -> None:
    row = _find_plan(ledger, name)
    folder = Path(row.record.folder)
    gone = not folder.exists()  # as after `caf rebuild`, or on another machine
    terms = {} if gone else read_terms(folder)
    if not gone:
        require_undamaged(folder)
    seen = None if gone else plan_statistics([folder], part_bytes=settings.packing.part_size)
    chunks = [
        chunk for chunk in ledger.chunks.list(row.record.source) if chunk.plan == row.record.name
    ]
    if json:
        target = int(terms["target_size"]) if "target_size" in terms else None
        described = {"target_bytes": target, **(seen.as_json() if seen else {})}
        print_json(
            {**_plan_json(row), **described, "chunk_list": [_chunk_json(chunk) for chunk in chunks]}
        )
        return
    record = row.record
    _print_lines(
        {
            "plan": f"{record.name} of source {record.source}",
            "planned": show_time(row.created_at),
            "inventory": record.snapshot,
            "objects": f"{record.object_count:,}, {show_size(record.object_bytes)}",
            "split": _split(seen) if seen else "",
            "chunks": f"{len(chunks):,} of {show_size(int(terms['target_size']))}"
            if "target_size" in terms
            else f"{len(chunks):,}",
            "states": _states(row.chunks),
            "folder": f"{record.folder}{', which is not on this machine: what was planned is not shown' if gone else ''}",  # noqa: E501
        }
    )
    if seen:
        _print_objects(seen)
    for chunk in chunks[:SHOWN]:
        size = show_size(chunk.caf_size_bytes or chunk.expected_size_bytes)
        objects = f"{chunk.object_count:>9,} {'object ' if chunk.object_count == 1 else 'objects'}"
        typer.echo(f"{chunk.name}  {chunk.state:<10} {objects} {size:>10}")
    if len(chunks) > SHOWN:
        typer.echo(f"… and {len(chunks) - SHOWN} more chunks: caf plans show {name} --json")


def _chunk_json(chunk: Chunk) -> dict[str, object]:
    return {
        "chunk": chunk.name,
        "state": str(chunk.state),
        "objects": chunk.object_count,
        "bytes": chunk.object_bytes,
        "expected_bytes": chunk.expected_size_bytes,
        "caf_bytes": chunk.caf_size_bytes or None,
        "members": chunk.member_count,
        "skipped": chunk.skipped_count,
        "released": chunk.released_count,
        "attempts": chunk.attempts,
        "part": chunk.part or None,
        "part_count": chunk.part_count or None,
        "reason": chunk.reason or None,
        "located_at": _iso(chunk.located_at),
    }


def _iso(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None


def _show_chunk(ledger: Ledger, name: str, *, json: bool) -> None:
    if ChunkId.parse(name) is None:
        raise UsageError(
            f"'{printable(name)}' is not a chunk's id.",
            hint="It looks like demo-2f20e129-00006; caf status lists them.",
        )
    chunk = ledger.chunks.get(name)
    folder = Path(chunk.plan_folder)
    first, last = (
        _key_range(folder, chunk.number) if folder.exists() and not chunk.adopted else (None, None)
    )
    if json:
        keys = {
            "first_key": first,
            "last_key": last,
            "plan": chunk.plan,
            "source": chunk.source,
            "number": chunk.number,
        }
        root = chunk.merkle_root.hex() if chunk.merkle_root else None
        print_json({**_chunk_json(chunk), **keys, "merkle_root": root, "adopted": chunk.adopted})
        return
    packed = f"{show_size(chunk.caf_size_bytes)}, {counted(chunk.member_count, 'member')}"
    left = (
        f", {chunk.skipped_count:,} skipped, {chunk.released_count:,} given back to be planned "
        "again"
    )
    _print_lines(
        {
            "chunk": f"{chunk.name}, number {chunk.number:,} of plan {chunk.plan} of source "
            f"{chunk.source}",
            "state": f"{chunk.state}{f': {printable(chunk.reason)}' if chunk.reason else ''}",
            "adopted": "a CAF file of another program, which no plan made" if chunk.adopted else "",
            "planned": f"{counted(chunk.object_count, 'object')}, {show_size(chunk.object_bytes)}; "
            "the file about"
            f" {show_size(chunk.expected_size_bytes)}"
            if not chunk.adopted
            else "",
            "keys": f"{printable(first)} … {printable(last)}"
            if first is not None and last is not None
            else "",
            "part": f"{chunk.part:,} of {chunk.part_count:,} of this object" if chunk.part else "",
            "packed": f"{packed}{left}" if chunk.was_sealed else "",
            "root": chunk.merkle_root.hex() if chunk.merkle_root else "",
            "located": show_time(chunk.located_at) if chunk.located_at else "",
        }
    )


def _key_range(folder: Path, number: int) -> tuple[str, str]:
    """Return the first and the last key of a chunk, as its plan's files have them."""
    keys: list[bytes] = []
    for batch in read_chunk_batches(folder, number, ["key"]):
        if batch.num_rows:
            keys = [*keys[:1], batch["key"][0].as_py(), batch["key"][-1].as_py()]
    if not keys:
        raise CafError(
            f"the plan in {folder} has no object in chunk {number}",
            hint="restore the folder of plans",
        )
    return keys[0].decode(), keys[-1].decode()
