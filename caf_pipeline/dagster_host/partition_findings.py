"""Finds partitions whose state in Dagster differs from the ledger, for `caf doctor`."""

from collections.abc import Iterator
from functools import partial

from dagster import DagsterInstance

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host.code_location import code_location
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.dagster_host.storage import may_have_state
from caf_pipeline.defs.failed_partitions import failed_partitions, report_located
from caf_pipeline.errors import SettingsError
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.maintenance.doctor.findings import (
    ALREADY_GONE,
    Finding,
    Kind,
    MendResult,
    mendable,
    not_checked,
)
from caf_pipeline.naming import partitions_name
from caf_pipeline.settings import Settings


def partition_findings(source: str, *, settings: Settings, ledger: Ledger) -> Iterator[Finding]:
    """Yield partitions without a chunk, e.g. added in the UI, and located chunks shown as failed.

    Creates no Dagster home.
    """
    try:
        if not may_have_state(settings):
            return
        with open_instance(settings) as instance:
            yield from _without_chunk(instance, source, ledger)
            keys = code_location(settings, ()).keys
            yield from _shown_as_failed(instance, source, ledger, keys)
    except SettingsError as error:
        yield not_checked(f"partitions of {source}", error)


def _without_chunk(instance: DagsterInstance, source: str, ledger: Ledger) -> Iterator[Finding]:
    # A ledger without any chunk of the source may be lost. Partitions named like chunks are then
    # left alone.
    def remove(name: str) -> MendResult:
        if not instance.has_dynamic_partition(partitions_name(source), name):
            return ALREADY_GONE
        instance.delete_dynamic_partition(partitions_name(source), name)
        return MendResult("removed from Dagster")

    # Read partitions before chunks, since a plan writes the chunk first.
    names = instance.get_dynamic_partitions(partitions_name(source))
    chunks = set[str]()
    if source in ledger.lookup.sources():
        chunks = {chunk.name for chunk in ledger.chunks.list(source)}
    for name in names:
        chunk_id = ChunkId.parse(name)
        may_be_chunk = chunk_id is not None and chunk_id.source == source
        if name in chunks or (not chunks and may_be_chunk):
            continue
        yield mendable(
            Kind.PARTITION,
            name,
            "the ledger has no chunk of this name, and every run of the partition fails",
            "removed from Dagster",
            partial(remove, name),
        )


def _shown_as_failed(
    instance: DagsterInstance, source: str, ledger: Ledger, keys: AssetKeys
) -> Iterator[Finding]:
    def report(name: str) -> MendResult:
        failed = failed_partitions(instance, source, keys, [name])
        chunk = ledger.chunks.get(name)
        if name not in failed or chunk.state is not ChunkState.LOCATED:
            return ALREADY_GONE
        report_located(instance, chunk, ledger.chunks.recipients(name), failed[name])
        return MendResult("reported to Dagster as materialized")

    failed = failed_partitions(instance, source, keys)
    if not failed:
        return
    for chunk in ledger.chunks.list(source, [ChunkState.LOCATED]):
        if chunk.name in failed:
            yield mendable(
                Kind.PARTITION,
                chunk.name,
                "it is located, but Dagster shows its latest run, which failed",
                "reported to Dagster as materialized",
                partial(report, chunk.name),
            )
