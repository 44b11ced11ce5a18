"""The five assets of a source: inventory, plan, and three for each chunk.

Inventory and plan are one run; a chunk's assets are graphs of `ops`. Source: "Flow" in
docs/explanation/design.md.
"""

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from dagster import (
    AssetExecutionContext,
    AssetIn,
    AssetKey,
    AssetOut,
    AssetsDefinition,
    AssetSpec,
    AutomationCondition,
    Config,
    DataVersion,
    FreshnessPolicy,
    MaterializeResult,
    Nothing,
    graph_multi_asset,
    multi_asset,
)
from pydantic import Field

from caf_pipeline.defs import metadata, ops
from caf_pipeline.defs.asset_checks import ChunkCheck, chunk_checks
from caf_pipeline.defs.failures import RETRY_TRANSIENT
from caf_pipeline.defs.partitions import chunk_partitions, register_chunks
from caf_pipeline.defs.resources import EVERY_STEP, RunResource, attempt_step
from caf_pipeline.errors import UsageError
from caf_pipeline.naming import (
    COMMAND_TAG,
    LAUNCH_SENSOR,
    asset_key,
    identifier,
    new_objects_name,
    op_name,
    reconcile_name,
    s3_key,
)
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import SourceSettings
from caf_pipeline.system.quantities import counted, show_size

PLAN_VERSION: Final = DataVersion("plans only add")
"""Constant: a new data version would mark every existing chunk as stale."""

PLAN_WAIT_SECONDS: Final = 3600.0
"""Wait for another plan. Planning 10⁸ objects takes some minutes."""

DAILY_FRESHNESS: Final = FreshnessPolicy.time_window(
    warn_window=timedelta(hours=26), fail_window=timedelta(days=2)
)
"""Two hours are for a long listing. Chunks have no policy: docs/decisions/0024-freshness.md."""

_INVALID_ESCAPE: Final = re.compile("%(?![0-9A-Fa-f]{2})")

Results = Iterator[MaterializeResult[Any]]


class InventoryConfig(Config):
    """Selects the inventory to take.

    The default is the whole source, from its newest inventory report if it has any.
    """

    after: str = Field(
        default="",
        description="Percent-encoded key. Lists only keys greater than it, compared as bytes.",
    )
    until: str | None = Field(
        default=None,
        description="Percent-encoded key. Lists up to and including it; default: to the end.",
    )
    report: str = Field(
        default="",
        description="Day of an inventory report, e.g. `2026-11-21`, or the name of its folder. If "
        "several match, the newest is taken.",
    )
    list_bucket: bool = Field(
        default=False, description="List the bucket even if the source has inventory reports."
    )

    def window(self) -> tuple[bytes, bytes | None]:
        """Return the keys to list: start (exclusive) and end (inclusive; None: no end)."""
        for name, key in (("after", self.after), ("until", self.until or "")):
            if _INVALID_ESCAPE.search(key):
                raise UsageError(
                    f"'{name}' is not percent-encoded: '{key}'",
                    hint="write a '%' of the key as '%25'",
                )
        after = unquote_to_bytes(self.after)
        if self.until is None:
            return after, None
        until = unquote_to_bytes(self.until)
        if until <= after:
            raise UsageError(
                f"the range of keys is empty: 'until' ('{self.until}') is not greater than 'after' "
                f"('{self.after}')",
                hint="leave 'until' out to list to the end",
            )
        return after, until

    def uses_report(self, settings: SourceSettings) -> bool:
        lists = self.list_bucket or bool(self.after) or self.until is not None
        if lists and self.report:
            raise UsageError(
                "'report' cannot be combined with 'list_bucket', 'after' or 'until': a report is "
                "always taken as a whole"
            )
        return bool(self.report) or (bool(settings.inventory) and not lists)


class PlanConfig(Config):
    """Options of a plan."""

    new_archive: bool = Field(
        default=False,
        description="Plan the source even if the ledger has nothing of it and the store has files "
        "that may hold its objects.",
    )


def source_assets(
    source: str, settings: SourceSettings, recipients: int, *, on_jackal: bool
) -> list[AssetsDefinition]:
    """Return the assets of one source, in flow order.

    `recipients` is the number of recipients of the source's new chunks.
    """
    access = _access(source, settings, recipients)
    accounts, proven, reads_back = chunk_checks(source, on_jackal=on_jackal)
    return [
        _inventory(source, settings, access),
        _plan(source, settings),
        _chunk_asset(
            source,
            "caf_chunk",
            owner=settings.owner,
            upstream="chunk_plan",
            op=ops.pack_op,
            check=accounts,
            description=(
                "One **CAF file** per partition. It holds the objects of the chunk, an index and a "
                "manifest. Every byte read from S3 is checked. The file stays in staging until it "
                f"is stored.\n\n{access}"
            ),
            kinds={"s3", "file"},
        ),
        _chunk_asset(
            source,
            "stored_chunk",
            owner=settings.owner,
            upstream="caf_chunk",
            op=ops.store_op,
            check=proven,
            description=(
                "The chunk in its store. It is complete only when the store lists all required "
                "copies **and** samples read back from them match those taken when the chunk was "
                f"sealed.\n\n{access}"
            ),
            kinds={"jackal" if on_jackal else "file"},
        ),
        _chunk_asset(
            source,
            "file_locations",
            owner=settings.owner,
            upstream="stored_chunk",
            op=ops.locate_op,
            check=reads_back,
            description=(
                "One row in Postgres for each object of the chunk: its chunk and its byte range. "
                f"From here on, `caf get {source} KEY` needs one look-up and one ranged read."
            ),
            kinds={"postgres", "table"},
            shown=metadata.locations_definition(),
        ),
    ]


def _automation(source: str, settings: SourceSettings) -> str:
    if settings.automatic:
        return (
            "**Automatic:** new objects are planned and archived automatically, because the "
            "settings say `automatic = true`."
        )
    return (
        "**Not automatic:** nothing is planned, archived or paid until you start it. To change "
        f"this, set `automatic = true` in `[sources.{source}]` and reload the code location. Or "
        f"switch on `{new_objects_name(source)}`, `{reconcile_name(source)}` and "
        f"`{LAUNCH_SENSOR}` under *Automation*."
    )


def _access(source: str, settings: SourceSettings, recipients: int) -> str:
    if settings.public:
        return "**Public:** chunks are stored in the clear, so anybody can read every object."
    if not recipients:
        return (
            "**No recipients:** nothing is packed until `recipients` in `[encryption]` or "
            f"`[sources.{source}]` names a key to encrypt to. `caf keys new` makes a key."
        )
    return (
        f"**Private:** new chunks are encrypted to {counted(recipients, 'recipient')}. Only their "
        "identities can read the objects."
    )


def _source_asset(
    source: str, name: str, spec: AssetSpec
) -> Callable[[Callable[..., Results]], AssetsDefinition]:
    # `multi_asset` allows a name for the op. `asset` names it after the key.
    return multi_asset(
        name=op_name(source, name),
        description=spec.description,
        specs=[spec],
        retry_policy=RETRY_TRANSIENT,
        required_resource_keys=EVERY_STEP | {s3_key(source)},
    )


def _inventory(source: str, settings: SourceSettings, access: str) -> AssetsDefinition:
    origin = (
        f"It is taken from the newest S3 Inventory report in `{settings.inventory}`."
        if settings.inventory
        else "It is taken by listing the bucket."
    )

    spec = AssetSpec(
        asset_key(source, "s3_inventory"),
        description=(
            f"The objects in `s3://{settings.bucket}/{settings.prefix}`: every key with its size, "
            f"ETag and time, as one sorted Parquet file on this machine. {origin} You can take a "
            "new inventory at any time: it changes nothing in the bucket or the archive."
            f"\n\n{access}\n\n{_automation(source, settings)}\n\n"
            "*Launchpad:* `after` and `until` limit the listing to a range of keys; the sensor "
            "uses them for new objects. `report` takes the inventory report of a day. "
            "`list_bucket` lists the bucket even if there are reports."
        ),
        skippable=True,
        group_name=identifier(source),
        owners=[settings.owner],
        kinds={"s3", "parquet"},
        freshness_policy=DAILY_FRESHNESS if settings.automatic else None,
        metadata=metadata.table_definition(metadata.INVENTORY_COLUMNS),
    )

    @_source_asset(source, "s3_inventory", spec)
    def s3_inventory(context: AssetExecutionContext, config: InventoryConfig) -> Results:
        def take(run_context: RunContext) -> metadata.Metadata:
            from caf_pipeline.steps import inventories

            after, until = config.window()
            run_context.wait_while_paused(lambda: None)  # before a listing that may take long
            report = None
            patience = _patience(context, whole=not after and until is None)
            if config.uses_report(settings):
                snapshot, report = inventories.take_report(
                    run_context, config.report, patience_seconds=patience
                )
            else:
                snapshot = inventories.take_inventory(
                    run_context, after=after, until=until, patience_seconds=patience
                )
            warnings = [
                inventories.empty_inventory_warning(run_context, snapshot),
                report.warning if report else "",
            ]
            warning = "; ".join(filter(None, warnings))
            if warning:
                context.log.warning(warning)
            return metadata.snapshot_metadata(snapshot, warning, report)

        shown = attempt_step(context, source, take)
        if shown is not None:
            yield MaterializeResult(metadata=shown)

    return s3_inventory


def _patience(context: AssetExecutionContext, *, whole: bool) -> float:
    """Return how many seconds to wait for another inventory or plan of the source.

    The sensor's next tick sees objects that its plan left out, but a daily inventory that is not
    planned is lost.
    """
    return PLAN_WAIT_SECONDS if whole and COMMAND_TAG not in context.run.tags else 0.0


def _plan(source: str, settings: SourceSettings) -> AssetsDefinition:
    spec = AssetSpec(
        asset_key(source, "chunk_plan"),
        deps=[AssetKey(asset_key(source, "s3_inventory"))],
        description=(
            "Which objects go into which chunk. The plan takes the objects of the inventory that "
            "no chunk has yet, and cuts them into chunks of about "
            f"{show_size(settings.target_size)}. Each chunk becomes a **partition**, e.g. "
            f"`{source}-1a2b3c4d-00001`. To archive the chunks, materialize their partitions in "
            f"the next three assets, or switch on the sensor `{LAUNCH_SENSOR}`."
            f"\n\n{_automation(source, settings)}\n\n"
            "If the ledger is empty, the plan first checks whether the store may already have the "
            "source, and fails if so: `caf rebuild` restores such a ledger. *Launchpad:* "
            "`new_archive` skips this check; the objects may then be stored and paid twice."
        ),
        skippable=True,
        group_name=identifier(source),
        owners=[settings.owner],
        kinds={"parquet", "postgres"},
        freshness_policy=DAILY_FRESHNESS if settings.automatic else None,
        # Plans an inventory that was taken alone. The job of the sensor takes and plans it.
        automation_condition=AutomationCondition.eager() if settings.automatic else None,
        metadata=metadata.table_definition(metadata.PLAN_COLUMNS),
    )

    @_source_asset(source, "chunk_plan", spec)
    def chunk_plan(context: AssetExecutionContext, config: PlanConfig) -> Results:
        def cut(run_context: RunContext) -> metadata.Metadata:
            from caf_pipeline.steps import inventories, planning, preview

            snapshot = inventories.snapshot_to_plan(run_context)
            report = planning.cut_plan(
                run_context,
                snapshot,
                new_archive=config.new_archive,
                patience_seconds=_patience(context, whole=snapshot.complete),
            )
            if report.warning:
                context.log.warning(report.warning)
            on_jackal = run_context.settings.store.kind == "jackal"
            registered = register_chunks(context.instance, run_context.ledger, source)
            shown = metadata.plan_metadata(
                report,
                registered,
                copies=run_context.settings.jackal.copies if on_jackal else 0,
                estimate=preview.estimate_report(run_context, report),
            )
            return shown | metadata.skips(run_context.ledger.chunks.account(source).skipped)

        shown = attempt_step(context, source, cut)
        if shown is not None:
            from caf_pipeline.automation.plan_launch import launch_planned

            run: RunResource = context.resources.caf_run
            keys = run.asset_keys
            launch_planned(context, run.settings, source, keys)
            shown |= metadata.plan_lineage(keys.key(source, "s3_inventory"))
            yield MaterializeResult(metadata=shown, data_version=PLAN_VERSION)

    return chunk_plan


def _chunk_asset(
    source: str,
    name: str,
    *,
    upstream: str,
    owner: str,
    op: Callable[[str, ChunkCheck], ops.Op],
    check: ChunkCheck,
    description: str,
    kinds: set[str],
    shown: metadata.Metadata | None = None,
) -> AssetsDefinition:
    # The graph shows the plan as the upstream asset. No value passes: a chunk reads its own part
    # of the plan, not the latest materialization.
    out = AssetOut(
        key=asset_key(source, name),
        description=description,
        owners=[owner],
        kinds=kinds,
        metadata=shown,
    )
    spec, step = check.spec(source), op(source, check)

    @graph_multi_asset(
        name=op_name(source, name),
        ins={"before": AssetIn(asset_key(source, upstream), dagster_type=Nothing)},
        outs={ops.RESULT: out},
        check_specs=[spec],
        can_subset=True,
        partitions_def=chunk_partitions(source),
        group_name=identifier(source),
    )
    def chunk(before: Any) -> Any:  # noqa: ANN401 - Dagster exports no type for a graph's values
        result, evaluation = step(before)
        return {ops.RESULT: result, spec.get_python_identifier(): evaluation}

    return chunk
