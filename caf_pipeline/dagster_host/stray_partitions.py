"""Finds partitions in Dagster without a chunk in the ledger, for `caf doctor`: somebody added them
in the UI.
"""

from collections.abc import Iterator
from functools import partial

from dagster import DagsterInstance

from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.dagster_host.storage import may_have_state
from caf_pipeline.defs.naming import partitions_name
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
from caf_pipeline.settings import Settings


def stray_partitions(source: str, *, settings: Settings, ledger: Ledger) -> Iterator[Finding]:
    """Yield the partitions of a source whose names are no chunks of the ledger; mending removes
    them from Dagster.

    If the ledger has no chunk of the source, it may be lost: then partitions that could be chunks
    are left alone. If Dagster never ran, no Dagster home is made.
    """
    if not may_have_state(settings):
        return
    try:
        with open_instance(settings) as instance:
            for name in _without_chunk(instance, source, ledger):
                fault = "the ledger has no chunk of this name, and every run of the partition fails"
                yield mendable(
                    Kind.PARTITION,
                    name,
                    fault,
                    "removed from Dagster",
                    partial(_remove, instance, source, name),
                )
    except SettingsError as error:
        yield not_checked(f"partitions of {source}", error)


def _without_chunk(instance: DagsterInstance, source: str, ledger: Ledger) -> list[str]:
    names = instance.get_dynamic_partitions(
        partitions_name(source)
    )  # before the chunks: a plan writes the chunk first
    chunks = (
        {chunk.name for chunk in ledger.chunks.list(source)}
        if source in ledger.lookup.sources()
        else set[str]()
    )
    return [
        name for name in names if name not in chunks and (chunks or not _is_chunk_of(name, source))
    ]


def _is_chunk_of(name: str, source: str) -> bool:
    chunk = ChunkId.parse(name)
    return chunk is not None and chunk.source == source


def _remove(instance: DagsterInstance, source: str, name: str) -> MendResult:
    if not instance.has_dynamic_partition(partitions_name(source), name):
        return ALREADY_GONE
    instance.delete_dynamic_partition(partitions_name(source), name)
    return MendResult("removed from Dagster")
