"""Jobs: which assets and checks are run together."""

from collections.abc import Sequence

from dagster import AssetCheckKey, AssetKey, AssetSelection, define_asset_job

from caf_pipeline.defs.dagster_private import UnresolvedAssetJobDefinition
from caf_pipeline.defs.naming import (
    ASSETS,
    SOURCE_IS_COMPLETE,
    SOURCE_TAG,
    STORAGE_PLAN_LASTS,
    asset_key,
    job_name,
)

_PLAN = ASSETS[:2]
_CHUNK = ASSETS[2:]


def source_jobs(source: str, *, on_jackal: bool) -> list[UnresolvedAssetJobDefinition]:
    """Return the jobs of one source."""
    return [*_archiving(source), _storage_plan(source)] if on_jackal else _archiving(source)


def _storage_plan(source: str) -> UnresolvedAssetJobDefinition:
    return define_asset_job(
        job_name(source, "storage_plan"),
        selection=_check(source, "chunk_plan", STORAGE_PLAN_LASTS),
        tags={SOURCE_TAG: source},
        description="Ask the chain how long the bought space lasts. Daily.",
    )


def _archiving(source: str) -> list[UnresolvedAssetJobDefinition]:
    accounts = _check(source, "chunk_plan", "plan_accounts_for_inventory")
    complete = _check(source, "s3_inventory", SOURCE_IS_COMPLETE)
    plan = _assets(source, _PLAN) | accounts
    tags = {SOURCE_TAG: source}
    return [
        define_asset_job(
            job_name(source, "plan"),
            selection=plan | complete,
            tags=tags,
            description=(
                "Take an inventory, plan what is not yet archived, and ask whether the source is complete. Each new chunk "
                "becomes a partition. Daily, and whenever the sensor sees new objects."
            ),
        ),
        define_asset_job(
            job_name(source, "archive"),
            selection=_assets(source, _CHUNK)
            | _check(source, "caf_chunk", "chunk_accounts_for_plan")
            | _check(source, "file_locations", "chunk_reads_back"),
            tags=tags,
            description=(
                "Archive one chunk (a partition): pack, store, verify, locate. May be run again: what is done stays done."
            ),
        ),
        define_asset_job(
            job_name(source, "audit"),
            selection=complete,
            tags=tags,
            description="Only ask whether every object of the latest whole inventory is located; after the last chunk of a plan.",
        ),
    ]


def _assets(source: str, names: Sequence[str]) -> AssetSelection:
    return AssetSelection.assets(*(AssetKey(asset_key(source, name)) for name in names)).without_checks()


def _check(source: str, asset: str, name: str) -> AssetSelection:
    return AssetSelection.checks(AssetCheckKey(AssetKey(asset_key(source, asset)), name))
