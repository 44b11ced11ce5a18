"""Partitions: a partition is a chunk, never an object.

Holds the definition of a source's dynamic partitions, and how the ledger's chunks become known to Dagster. The ledger is
what counts: a key that Dagster lacks, e.g. after a kill between the two, is added from there.
"""

from collections.abc import Sequence
from typing import Final

from dagster import DagsterInstance, DynamicPartitionsDefinition

from caf_pipeline.defs.naming import partitions_name
from caf_pipeline.ledger.postgres import Ledger

KEYS_A_CALL: Final = 5_000
"""Keys added at once: each takes two parameters of a statement, of which SQLite allows 32,766."""


def chunk_partitions(source: str) -> DynamicPartitionsDefinition:
    """Return the partitions of a source's chunks."""
    return DynamicPartitionsDefinition(name=partitions_name(source))


def unregistered_chunks(instance: DagsterInstance, ledger: Ledger, source: str) -> Sequence[str]:
    """Return the names of the ledger's chunks of a source, of any state, that Dagster has no partition for."""
    known = set(instance.get_dynamic_partitions(partitions_name(source)))
    return [chunk.name for chunk in ledger.chunks(source) if chunk.name not in known]


def register_chunks(instance: DagsterInstance, ledger: Ledger, source: str) -> int:
    """Add a partition for every chunk of the source that has none; return how many were added. May be repeated."""
    missing = unregistered_chunks(instance, ledger, source)
    for start in range(0, len(missing), KEYS_A_CALL):
        instance.add_dynamic_partitions(partitions_name(source), list(missing[start : start + KEYS_A_CALL]))
    return len(missing)
