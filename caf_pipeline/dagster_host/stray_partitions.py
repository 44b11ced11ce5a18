"""Finds partitions without a chunk in the ledger, e.g. added in the UI, for `caf doctor`."""

from collections.abc import Iterator
from functools import partial

from dagster import DagsterInstance

from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.dagster_host.storage import may_have_state
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


def stray_partitions(source: str, *, settings: Settings, ledger: Ledger) -> Iterator[Finding]:
    """Yield partitions without a chunk; the remedy removes them.

    A ledger without any chunk of the source may be lost. Partitions named like chunks are then left
    alone. Creates no Dagster home.
    """

    def remove(instance: DagsterInstance, name: str) -> MendResult:
        if not instance.has_dynamic_partition(partitions_name(source), name):
            return ALREADY_GONE
        instance.delete_dynamic_partition(partitions_name(source), name)
        return MendResult("removed from Dagster")

    try:
        if not may_have_state(settings):
            return
        with open_instance(settings) as instance:
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
                    partial(remove, instance, name),
                )
    except SettingsError as error:
        yield not_checked(f"partitions of {source}", error)
