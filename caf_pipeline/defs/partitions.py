"""Partitions: a partition is a chunk of the ledger, never an object."""

from typing import Final

from dagster import DagsterInstance, DynamicPartitionsDefinition

from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.naming import partitions_name

KEYS_A_CALL: Final = 5_000
"""Each takes two parameters of a statement, and SQLite allows 32,766."""


def chunk_partitions(source: str) -> DynamicPartitionsDefinition:
    """Return a source's partitions."""
    return DynamicPartitionsDefinition(name=partitions_name(source))


def register_chunks(instance: DagsterInstance, ledger: Ledger, source: str) -> int:
    """Add missing partitions; return their number. Idempotent.

    Adopted files get no partition: no run packs or uploads them.
    """
    registered = set(instance.get_dynamic_partitions(partitions_name(source)))
    missing = [
        chunk.name
        for chunk in ledger.chunks.list(source)
        if chunk.name not in registered and not chunk.adopted
    ]
    for start in range(0, len(missing), KEYS_A_CALL):
        instance.add_dynamic_partitions(
            partitions_name(source), missing[start : start + KEYS_A_CALL]
        )
    return len(missing)
