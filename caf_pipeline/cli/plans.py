"""`caf plan` and `caf plans`."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.cli.completing import complete_source
from caf_pipeline.cli.opening import (
    chosen_source,
    opened_ledger,
    opened_run_context,
    require_source,
)
from caf_pipeline.cli.terminal import (
    JsonOption,
    ListOption,
    ReportOption,
    counted,
    exclusive,
    note,
    print_json,
    printable,
    show_coins,
    show_size,
    show_time,
)
from caf_pipeline.errors import CafError, NotLocated, UsageError
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.inventory.plan import read_chunk_batches, read_terms, verify_plan
from caf_pipeline.inventory.plan_statistics import PlanStatistics, histogram_lines, plan_statistics
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import PlanRow
from caf_pipeline.records import Chunk
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.steps import inventories
from caf_pipeline.steps.preview import PRICES_OF, PlanEstimate, PlanPreview, preview_plan
from caf_pipeline.store.protocol import StorageCost
from caf_pipeline.system.quantities import table_lines

SHOWN: Final = 50
"""Lines without --json."""

_USAGE: Final = "caf plans SOURCE, caf plans show PLAN, or caf plans chunk CHUNK"


def plan(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="The source, if there are several.",
            autocompletion=complete_source,
        ),
    ] = None,
    *,
    _dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Has no effect: the command never plans.")
    ] = False,
    last_inventory: Annotated[
        bool,
        typer.Option("--last-inventory", help="Use the latest complete inventory; take none."),
    ] = False,
    report: ReportOption = None,
    list_bucket: ListOption = False,
    json: JsonOption = False,
) -> None:
    r"""Show what a plan of a source would do and cost.

    Takes an inventory as `caf run` does, and keeps it. Cuts the objects that no chunk has into
    chunks; nothing is planned or claimed.

    Prices are estimates. You pay S3 once, for requests and egress: see the settings get_price and
    egress_price. You pay Jackal every 30 days, for the space of the plan and of the source's other
    chunks: the chain states the price. The time is from the source's last chunks. See
    docs/explanation/planning.md and docs/how-to/sizing.md.

    \b
    Example:
      caf plan demo --json | jq '.chunks, .charged_bytes'

    \b
    Exit status: 0, 3, 5, 6
      2   Options exclude each other.
      8   The disk of `home` failed.
      9   The inventory is damaged.
      11  There is no inventory, or the last one has another setting of versions.
    """
    settings = load_settings()
    source = chosen_source(settings, source, hint="caf plan SOURCE takes one.")
    exclusive(last_inventory=last_inventory, report=report, list=list_bucket)
    with (
        opened_ledger(settings) as ledger,
        opened_run_context(settings, ledger, source, register=False) as context,
    ):
        if last_inventory:
            snapshot = inventories.latest_whole_snapshot(
                context, hint="run it without --last-inventory to take an inventory"
            )
        elif report or (context.source_settings.inventory and not list_bucket):
            snapshot, taken = inventories.take_report(context, report or "", to_plan=False)
            if taken.warning:
                note(taken.warning)
        else:
            snapshot = inventories.take_inventory(context, to_plan=False)
        if warning := inventories.empty_inventory_warning(context, snapshot):
            note(warning)
        preview = preview_plan(context, snapshot)
    if json:
        print_json(**preview.as_json())
    else:
        _print_preview(preview, public=settings.source(source).public)


def plans(
    words: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE | show PLAN | chunk CHUNK", help="What to show, see above."),
    ],
    json: JsonOption = False,
) -> None:
    r"""List plans; show one plan, or one of its chunks.

    PLAN is a plan's name, or SOURCE-PLAN if two sources have a plan of this name. CHUNK is a
    chunk's id. The plan's files show what was planned, the ledger the result. If these are not on
    this machine, only the ledger is used.

    \b
    Examples:
      caf plans demo
      caf plans show 2f20e129
      caf plans chunk demo-2f20e129-00006 --json

    \b
    Exit status: 0, 3, 6, 11
      1  Some of the plan's files are missing or damaged.
      2  The arguments have none of the three forms.
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


def _print_preview(preview: PlanPreview, *, public: bool) -> None:
    snapshot, estimate = preview.snapshot, preview.estimate
    planned = estimate.statistics
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in preview.skipped.items())
    lines = {
        "inventory": f"{counted(snapshot.object_count, 'object')}, "
        f"{show_size(snapshot.object_bytes)}, {snapshot.name}"
    }
    if snapshot.report:
        # S3's clock may be ahead of this machine's.
        age = max(0.0, (datetime.now(UTC) - snapshot.taken_at).total_seconds())
        lines["report"] = (
            f"{snapshot.report}, of {show_time(snapshot.taken_at)}, {_duration(age)} old"
        )
    lines |= {
        "versions": snapshot.beside.sentence(all_versions=snapshot.all_versions),
        "archived": f"{preview.located:,} located, {preview.claimed:,} in chunks under way",
        "planned": f"{counted(planned.objects, 'object')}, {show_size(planned.size_bytes)}",
        "split": _split(planned),
    }
    if preview.to_compare:
        lines["compared"] = (
            f"{preview.to_compare:,} of them were written again; those with equal checksum and "
            "headers will be left out"
        )
    left_out = ", ".join(f"{count:,} by {name}" for name, count in preview.left_out.items())
    lines |= {"left out": left_out, "skipped": skipped or "none"}
    if waiting := preview.waiting:
        lines["waiting"] = (
            f"{counted(waiting.objects, 'object')}, {show_size(waiting.size_bytes)}, at most until "
            f"{show_time(waiting.until)}"
        )
    lines |= _estimated(estimate, preview.archive)
    if planned.objects and not public:
        lines["twice"] = "paid for chunks alone that are lost in staging and at every provider"
    if preview.plans > 1:
        # All parts of an object are in one plan, so that a plan may end with room left.
        at_least = "at least " if planned.split_objects > 1 else ""
        lines["plans"] = f"{at_least}{preview.plans:,}, since one has at most 99,999 chunks"
    lines["last plan"] = "none yet"
    if last := preview.difference:
        size = f"{'-' if last.size_bytes < 0 else '+'}{show_size(abs(last.size_bytes))}"
        lines["last plan"] = f"{last.plan} of {show_time(last.planned_at)}"
        if planned.objects:
            lines["last plan"] += (
                f"; this one has {last.objects:+,} objects, {size}, {last.chunks:+,} chunks"
            )
    _print_lines(lines | {"warning": preview.warning})
    _print_objects(planned)
    defaults = (
        f"; AWS's list prices of S3 Standard in us-east-1 of {PRICES_OF} are the defaults"
        if estimate.at_aws
        else ""
    )
    typer.echo(f"Prices and time are estimates without retries{defaults}.")
    typer.echo("Nothing was planned or claimed: use caf run.")


def _split(planned: PlanStatistics) -> str:
    if not planned.split_objects:
        return ""
    objects = counted(planned.split_objects, "object")
    return f"{objects} larger than a chunk, over {counted(planned.parts, 'chunk')}, a part each"


def _estimated(estimate: PlanEstimate, archive: StorageCost | None) -> dict[str, str]:
    lines = {"chunks": "none"}
    expected = show_size(estimate.expected_bytes)
    if estimate.chunks:
        lines["chunks"] = (
            f"{estimate.chunks:,} of {show_size(estimate.target_bytes)}, filled by "
            f"{estimate.fill:.1%} with objects; {expected} with indexes and manifests"
        )
    lines["requests"] = (
        f"{estimate.requests:,} GETs and HEADs, {_dollars(estimate.request_usd, 'get_price')}"
    )
    lines["egress"] = (
        f"{show_size(estimate.statistics.size_bytes)}, "
        f"{_dollars(estimate.egress_usd, 'egress_price')}"
    )
    if estimate.egress_usd and estimate.at_aws:
        lines["egress"] += ", 0 within the bucket’s region"
        if estimate.storage:
            lines["egress"] += ", where the upload of each copy is egress instead"
    if storage := estimate.storage:
        lines["storage"] = (
            f"{show_size(storage.charged_bytes)}: {storage.copies} copies of {expected}"
        )
        lines["price"] = (
            f"{storage.price_sentence}, and at most {show_coins(storage.fees_ujkl)} of fees once; "
            f"the space must be paid again every {storage.days} days"
        )
        if archive and archive.charged_bytes > storage.charged_bytes:
            lines["archive"] = (
                f"{show_size(archive.charged_bytes)} with the source's other chunks: "
                f"{archive.price_sentence}"
            )
    elif estimate.storage_unknown:
        lines["storage"] = f"not known: {printable(estimate.storage_unknown)}"
    else:
        lines["storage"] = "the store charges nothing"
    lines["time"] = "not known yet: too few chunks of this source were archived here"
    if estimate.rate and estimate.seconds is not None:
        rate = show_size(round(estimate.rate.bytes_per_second))
        lines["time"] = (
            f"about {_duration(estimate.seconds)}, at {rate}/s, the median of the last "
            f"{counted(estimate.rate.chunks, 'chunk')}"
        )
    return lines


def _dollars(usd: float | None, setting: str) -> str:
    return f"price not known: set {setting}" if usd is None else f"about {usd:,.2f} USD"


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _print_lines(lines: Mapping[str, str]) -> None:
    for name, text in lines.items():
        if text:
            typer.echo(f"{name:<10}{text}")


def _print_objects(planned: PlanStatistics) -> None:
    for name, (objects, size_bytes) in planned.storage_classes.items():
        typer.echo(
            f"{'class':<10}{printable(name)}: {counted(objects, 'object')}, {show_size(size_bytes)}"
        )
    for title, examples in (("largest", planned.largest), ("smallest", planned.smallest)):
        for key, size_bytes in examples:
            typer.echo(f"{title:<10}{show_size(size_bytes):>10}  {printable(key)}")
    for line in histogram_lines(planned.sizes):
        typer.echo(line)


# --- existing plans


def _list_plans(settings: Settings, ledger: Ledger, source: str, *, json: bool) -> None:
    require_source(settings, ledger.lookup, source)
    rows = ledger.plans.list(source)
    if json:
        for row in rows:
            print_json(**_plan_json(row))
        return
    if not rows:
        typer.echo(f"{source}: nothing planned yet")
        return
    shown = (
        (
            row.record.name,
            show_time(row.created_at),
            f"{row.record.object_count:,}",
            show_size(row.record.object_bytes),
            f"{sum(row.chunks.values()):,}",
            _states(row.chunks),
        )
        for row in rows[:SHOWN]
    )
    names = ("plan", "planned at", "objects", "size", "chunks", "states")
    for line in table_lines(names, shown, right=names[2:5]):
        typer.echo(line)
    if len(rows) > SHOWN:
        typer.echo(f"… and {len(rows) - SHOWN} more: caf plans {source} --json")


def _plan_json(row: PlanRow) -> dict[str, object]:
    return {
        "plan": row.record.name,
        "source": row.record.source,
        "planned_at": row.created_at,
        "inventory": row.record.snapshot,
        "objects": row.record.object_count,
        "bytes": row.record.object_bytes,
        "chunks": row.chunks,
        "folder": row.record.folder,
    }


def _states(chunks: Mapping[ChunkState, int]) -> str:
    return ", ".join(f"{count:,} {state}" for state, count in chunks.items())


def _show_plan(settings: Settings, ledger: Ledger, name: str, *, json: bool) -> None:
    rows = [
        row
        for row in ledger.plans.list()
        if name in (row.record.name, f"{row.record.source}-{row.record.name}")
    ]
    if not rows:
        raise NotLocated(
            f"there is no plan {name}", hint="caf plans SOURCE lists the plans of a source"
        )
    if len(rows) > 1:
        names = " or ".join(f"{row.record.source}-{row.record.name}" for row in rows)
        raise UsageError(
            f"{len(rows)} sources have a plan {name}.", hint=f"Name one of them: {names}."
        )
    row, record = rows[0], rows[0].record
    folder, terms, planned = Path(record.folder), {}, None
    if folder.exists():  # not after `caf rebuild`, or on another machine
        terms = read_terms(folder)
        verify_plan(folder)
        planned = plan_statistics([folder], part_bytes=settings.packing.part_size)
    target = int(terms["target_size"]) if "target_size" in terms else None
    chunks = [chunk for chunk in ledger.chunks.list(record.source) if chunk.plan == record.name]
    if json:
        statistics = planned.as_json() if planned else {}
        chunk_list = [_chunk_json(chunk) for chunk in chunks]
        print_json(**_plan_json(row), target_bytes=target, **statistics, chunk_list=chunk_list)
        return
    size = "" if target is None else f" of {show_size(target)}"
    absent = "" if planned else ", which is not on this machine: what was planned is not shown"
    _print_lines(
        {
            "plan": f"{record.name} of source {record.source}",
            "planned": show_time(row.created_at),
            "inventory": record.snapshot,
            "objects": f"{record.object_count:,}, {show_size(record.object_bytes)}",
            "split": _split(planned) if planned else "",
            "chunks": f"{len(chunks):,}{size}",
            "states": _states(row.chunks),
            "folder": f"{record.folder}{absent}",
        }
    )
    if planned:
        _print_objects(planned)
    for chunk in chunks[:SHOWN]:
        size = show_size(chunk.caf_size_bytes or chunk.expected_size_bytes)
        objects = f"{chunk.object_count:>9,} {'object ' if chunk.object_count == 1 else 'objects'}"
        typer.echo(f"{chunk.name}  {chunk.state:<10} {objects} {size:>10}")
    if len(chunks) > SHOWN:
        typer.echo(f"… and {len(chunks) - SHOWN} more chunks: caf plans show {name} --json")


def _chunk_json(chunk: Chunk) -> dict[str, object]:
    return {
        "chunk": chunk.name,
        "state": chunk.state,
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
        "located_at": chunk.located_at,
    }


def _show_chunk(ledger: Ledger, name: str, *, json: bool) -> None:
    if ChunkId.parse(name) is None:
        raise UsageError(
            f"'{printable(name)}' is not a chunk's id.",
            hint="It looks like demo-2f20e129-00006; caf status lists them.",
        )
    chunk = ledger.chunks.get(name)
    folder = Path(chunk.plan_folder)
    first = last = None
    if folder.exists() and not chunk.adopted:
        first, last = _key_range(folder, chunk.number)
    root = chunk.merkle_root.hex() if chunk.merkle_root else ""
    if json:
        print_json(
            **_chunk_json(chunk),
            first_key=first,
            last_key=last,
            plan=chunk.plan,
            source=chunk.source,
            number=chunk.number,
            merkle_root=root or None,
            adopted=chunk.adopted,
        )
        return
    lines = {
        "chunk": f"{chunk.name}, number {chunk.number:,} of plan {chunk.plan} of source "
        f"{chunk.source}",
        "state": f"{chunk.state}{f': {printable(chunk.reason)}' if chunk.reason else ''}",
    }
    if chunk.adopted:
        lines["adopted"] = "a CAF file of another program, not planned"
    else:
        lines["planned"] = (
            f"{counted(chunk.object_count, 'object')}, {show_size(chunk.object_bytes)}; the file "
            f"about {show_size(chunk.expected_size_bytes)}"
        )
    if first is not None and last is not None:
        lines["keys"] = f"{printable(first)} … {printable(last)}"
    if chunk.part:
        lines["part"] = f"{chunk.part:,} of {chunk.part_count:,} of this object"
    if chunk.was_sealed:
        lines["packed"] = (
            f"{show_size(chunk.caf_size_bytes)}, {counted(chunk.member_count, 'member')}, "
            f"{chunk.skipped_count:,} skipped, {chunk.released_count:,} given back to be planned "
            "again"
        )
    located = show_time(chunk.located_at) if chunk.located_at else ""
    _print_lines(lines | {"root": root, "located": located})


def _key_range(folder: Path, number: int) -> tuple[str, str]:
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
