"""Located chunks that Dagster shows as failed, because a later run failed before our code."""

from collections.abc import Mapping, Sequence

from dagster import AssetKey, AssetMaterialization, DagsterInstance

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.defs import metadata
from caf_pipeline.defs.evaluations import latest_materialization
from caf_pipeline.defs.partitions import chunk_partitions
from caf_pipeline.naming import ASSETS, DATA_VERSION_TAG, partitions_name
from caf_pipeline.records import Chunk


def failed_partitions(
    instance: DagsterInstance, source: str, keys: AssetKeys, chunks: Sequence[str] | None = None
) -> Mapping[str, Sequence[AssetKey]]:
    """Return the chunks, of these or of all, whose latest run failed, with the assets it failed.

    Dagster keeps the statuses of a source's partitions, and adds what changed since the last call.
    """
    if chunks is None:
        chunks = instance.get_dynamic_partitions(partitions_name(source))
    failed: dict[str, list[AssetKey]] = {}
    for name in ASSETS[2:]:
        key = keys.key(source, name)
        statuses = instance.get_status_by_partition(key, chunks, chunk_partitions(source)) or {}
        for chunk, status in statuses.items():
            if status is not None and status.value == "FAILED":
                failed.setdefault(chunk, []).append(key)
    return failed


def report_located(
    instance: DagsterInstance, chunk: Chunk, recipients: Sequence[str], assets: Sequence[AssetKey]
) -> None:
    """Materialize a located chunk's partition again, with the metadata of its last run."""
    assert chunk.merkle_root is not None
    root = chunk.merkle_root.hex()
    for key in assets:
        record = latest_materialization(instance, key, chunk.name)
        last = record.asset_materialization if record else None
        event = AssetMaterialization(
            key,
            partition=chunk.name,
            description="The ledger has this chunk as located; its latest run failed.",
            metadata=last.metadata
            if last
            else metadata.chunk_metadata(chunk, recipients) | {"merkle_root": root},
            tags={DATA_VERSION_TAG: root},
        )
        instance.report_runless_asset_event(event)
