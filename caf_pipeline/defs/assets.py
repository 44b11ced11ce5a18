"""A source's five assets: two of its inventory and plan, three of each chunk.

One set of definitions for every source, keyed `[source, name]`, one group a source. The two of the
plan are one run; the three of a chunk are graphs of the ops in `ops`, one run for each partition.
Source: "Flow" in docs/explanation/design.md.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from dagster import (
    AssetExecutionContext,
    AssetIn,
    AssetKey,
    AssetsDefinition,
    Config,
    DataVersion,
    FreshnessPolicy,
    MaterializeResult,
    Nothing,
    asset,
    graph_asset,
)
from pydantic import Field

from caf_pipeline.defs import metadata, ops
from caf_pipeline.defs.failures import RETRY_TRANSIENT
from caf_pipeline.defs.naming import (
    COMMAND_TAG,
    LAUNCH_SENSOR,
    asset_key,
    identifier,
    new_objects_name,
    reconcile_name,
    s3_key,
)
from caf_pipeline.defs.partitions import chunk_partitions, register_chunks
from caf_pipeline.defs.resources import EVERY_STEP, attempt_step
from caf_pipeline.errors import UsageError
from caf_pipeline.inventory.plan import PLAN_SCHEMA
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import SourceSettings
from caf_pipeline.steps import inventories, planning, preview
from caf_pipeline.system.quantities import show_size

PLAN_VERSION: Final = DataVersion("plans only add")
"""A plan never changes what an earlier one planned.

A new data version would mark every chunk there is as stale.
"""

PATIENCE_SECONDS: Final = 3600.0
"""For which the plan of a whole inventory waits for another plan of the source: one of 10⁸ objects
takes some minutes.
"""

FRESH: Final = FreshnessPolicy.time_window(
    warn_window=timedelta(hours=26), fail_window=timedelta(days=2)
)
"""For the assets of the daily schedule of an automatic source: a warning after a day, with two
hours more for a long listing. Chunks have no policy, since a chunk is made only if there are new
objects: docs/decisions/0024-freshness.md.
"""

_NO_ESCAPE: Final = re.compile("%(?![0-9A-Fa-f]{2})")

Results = Iterator[MaterializeResult[Any]]


class InventoryTerms(Config):
    """Which inventory is taken: of the whole source by default, from its newest inventory report
    where it has any.
    """

    after: str = Field(
        default="",
        description="Percent-encoded key; only keys greater than it, compared as bytes. Lists.",
    )
    until: str | None = Field(
        default=None,
        description="Percent-encoded key, the last one taken; to the end where not given. Lists.",
    )
    report: str = Field(
        default="",
        description="Day of an inventory report, e.g. `2026-11-21`, or the name of its folder; the "
        "newest such one is taken.",
    )
    list_bucket: bool = Field(
        default=False, description="List the bucket, although the source has inventory reports."
    )

    def window(self) -> tuple[bytes, bytes | None]:
        """Return the key that the listing begins after, and its last, None for the end; raise
        UsageError where that is none.
        """
        for name, key in (("after", self.after), ("until", self.until or "")):
            if _NO_ESCAPE.search(key):
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
                f"no key is taken: 'until' is '{self.until}', which is not greater than 'after', "
                f"'{self.after}'",
                hint="leave 'until' out to list to the end",
            )
        return after, until

    def takes_report(self, settings: SourceSettings) -> bool:
        """Tell whether a report is taken instead of a listing."""
        lists = self.list_bucket or bool(self.after) or self.until is not None
        if lists and self.report:
            raise UsageError(
                "a report is taken as a whole: 'report' goes with neither 'list_bucket', 'after' "
                "nor 'until'"
            )
        return bool(self.report) or (bool(settings.inventory) and not lists)


class PlanConfig(Config):
    """What a plan may do."""

    new_archive: bool = Field(
        default=False,
        description="Plan the source although the ledger has nothing of it and the store has files "
        "that may hold its objects.",
    )


def source_assets(source: str, settings: SourceSettings) -> list[AssetsDefinition]:
    """Return the assets of one source, in flow order."""
    return [_inventory(source, settings), _plan(source, settings), *_chunk_assets(source, settings)]


def _inventory(source: str, settings: SourceSettings) -> AssetsDefinition:
    @asset(
        key=asset_key(source, "s3_inventory"),
        description=(
            f"What is in `s3://{settings.bucket}/{settings.prefix}`: every key with its size, ETag "
            "and time, as one sorted "
            f"Parquet file on this machine. {_told_by(settings)} Take a new one whenever you like; "
            "it changes nothing by itself."
            f"\n\n{_automation(source, settings)}\n\n"
            "*Launchpad:* `after` and `until` take only a part of the listing; the sensor uses "
            "them for what is new. "
            "`report` takes the inventory report of a day, `list_bucket` lists although there are "
            "reports."
        ),
        retry_policy=RETRY_TRANSIENT,
        output_required=False,
        required_resource_keys=EVERY_STEP | {s3_key(source)},
        group_name=identifier(source),
        owners=[settings.owner],
        kinds={"s3", "parquet"},
        freshness_policy=FRESH if settings.automatic else None,
        metadata=metadata.file_definition(SNAPSHOT_SCHEMA),
    )
    def s3_inventory(context: AssetExecutionContext, config: InventoryTerms) -> Results:
        def take(run_context: RunContext) -> metadata.Metadata:
            after, until = config.window()
            run_context.wait_while_paused(lambda: None)  # now, not behind a long listing
            report = None
            if config.takes_report(settings):
                snapshot, report = inventories.take_report(run_context, config.report)
            else:
                snapshot = inventories.take_inventory(run_context, after=after, until=until)
            warning = "; ".join(
                filter(
                    None,
                    [
                        inventories.nothing_found(run_context, snapshot),
                        report.warning if report else "",
                    ],
                )
            )
            if warning:
                context.log.warning(warning)
            return metadata.snapshot_metadata(snapshot, warning, report)

        shown = attempt_step(context, source, take)
        if shown is not None:
            yield MaterializeResult(metadata=shown)

    return s3_inventory


def _told_by(settings: SourceSettings) -> str:
    """Say where the inventory comes from."""
    if not settings.inventory:
        return "The bucket is listed."
    return f"Taken from the newest report of S3 Inventory in `{settings.inventory}`."


def _automation(source: str, settings: SourceSettings) -> str:
    """Say whether the source is archived by itself, and how to switch that on."""
    if settings.automatic:
        return (
            "**Automatic:** new objects are planned and archived by themselves, since the "
            "settings say `automatic = true`."
        )
    return (
        "**Not automatic:** nothing is planned, archived or paid by itself. To switch that on, set "
        "`automatic = true` in "
        f"`[sources.{source}]` and reload the code location; or switch on "
        f"`{new_objects_name(source)}`, "
        f"`{reconcile_name(source)}` and `{LAUNCH_SENSOR}` under *Automation*."
    )


def _plan(source: str, settings: SourceSettings) -> AssetsDefinition:
    @asset(
        key=asset_key(source, "chunk_plan"),
        deps=[AssetKey(asset_key(source, "s3_inventory"))],
        description=(
            "Which objects go into which chunk. Takes what the inventory has and no chunk has yet, "
            "cuts it into files of about "
            f"{show_size(settings.target_size)}, and makes one **partition** for each, e.g. "
            f"`{source}-1a2b3c4d-00001`. To archive them, materialize the partitions of the next "
            "three assets, or let the "
            f"sensor `{LAUNCH_SENSOR}` do it.\n\n{_automation(source, settings)}\n\n"
            "The first plan of a ledger asks the store whether it has the source already, and is "
            "refused where it may: "
            "`caf rebuild` restores such a ledger. *Launchpad:* `new_archive` plans, and pays, all "
            "the same."
        ),
        retry_policy=RETRY_TRANSIENT,
        output_required=False,
        required_resource_keys=EVERY_STEP | {s3_key(source)},
        group_name=identifier(source),
        owners=[settings.owner],
        kinds={"parquet", "postgres"},
        freshness_policy=FRESH if settings.automatic else None,
        metadata=metadata.file_definition(PLAN_SCHEMA),
    )
    def chunk_plan(context: AssetExecutionContext, config: PlanConfig) -> Results:
        def cut(run_context: RunContext) -> metadata.Metadata:
            snapshot = inventories.snapshot_to_plan(run_context)
            # What a sensor's plan leaves out, its next look sees; a daily inventory that is not
            # planned is lost with its day.
            patience = (
                PATIENCE_SECONDS
                if snapshot.complete and COMMAND_TAG not in context.run.tags
                else 0.0
            )
            report = planning.cut_plan(
                run_context, snapshot, new_archive=config.new_archive, patience_seconds=patience
            )
            if report.warning:
                context.log.warning(report.warning)
            copies = (
                run_context.settings.jackal.copies
                if run_context.settings.store.kind == "jackal"
                else 0
            )
            registered = register_chunks(context.instance, run_context.ledger, source)
            estimate = preview.estimate_report(run_context, report)
            shown = metadata.plan_metadata(report, registered, copies=copies, estimate=estimate)
            return shown | metadata.skips(run_context.ledger.chunks.account(source).skipped)

        shown = attempt_step(context, source, cut)
        if shown is not None:
            yield MaterializeResult(metadata=shown, data_version=PLAN_VERSION)

    return chunk_plan


def _chunk_assets(source: str, settings: SourceSettings) -> list[AssetsDefinition]:
    return [
        _chunk_asset(
            source,
            "caf_chunk",
            owner=settings.owner,
            upstream="chunk_plan",
            steps=(ops.load_batch, ops.pack_chunk(source), ops.seal_chunk),
            description=(
                "One **CAF file** a partition: the objects of its part of the plan, read from S3 "
                "and checked byte for byte, one "
                "after the other, with an index and a manifest. It is in staging until it is "
                "stored."
            ),
            kinds={"s3", "file"},
        ),
        _chunk_asset(
            source,
            "stored_chunk",
            owner=settings.owner,
            upstream="caf_chunk",
            steps=(ops.post_file, ops.upload_chunk, ops.verify_stored),
            description=(
                "The chunk where it is kept for good. Complete only when the store lists the asked "
                "number of copies **and** "
                "pieces read back from it match those taken when the chunk was sealed."
            ),
            kinds={"jackal"},
        ),
        _chunk_asset(
            source,
            "file_locations",
            owner=settings.owner,
            upstream="stored_chunk",
            steps=(ops.load_locations, ops.release_staging),
            description=(
                "One row in Postgres for each object of the chunk: which bytes of which chunk it "
                "is. From here on "
                f"`caf get {source} KEY` answers with one look-up and one ranged read."
            ),
            kinds={"postgres"},
            shown=metadata.locations_definition(),
        ),
    ]


def _chunk_asset(
    source: str,
    name: str,
    *,
    upstream: str,
    owner: str,
    steps: Sequence[Callable[..., Any]],
    description: str,
    kinds: set[str],
    shown: metadata.Metadata | None = None,
) -> AssetsDefinition:
    # The plan is an input only in name: a chunk needs its own part of it, not its latest
    # materialization. It is still drawn as the upstream asset, which is what it is.
    @graph_asset(
        key=asset_key(source, name),
        ins={"before": AssetIn(asset_key(source, upstream), dagster_type=Nothing)},
        partitions_def=chunk_partitions(source),
        description=description,
        group_name=identifier(source),
        owners=[owner],
        kinds=kinds,
        metadata=shown,
    )
    def chunk(before: Any) -> Any:  # noqa: ANN401 - what graphs are composed of has no public type
        done = before
        for step in steps:
            done = step(done)
        return done

    return chunk
