"""Partitions: a partition is a chunk, never an object.

Holds the definition of a source's dynamic partitions, and how the ledger's chunks become known to
Dagster. The ledger is what counts: a key that Dagster lacks, e.g. after a kill between the two, is
added from there.
"""

from typing import Final

from dagster import DagsterInstance, DynamicPartitionsDefinition

from caf_pipeline.defs.naming import partitions_name
from caf_pipeline.ledger.ledger import Ledger

KEYS_A_CALL: Final = 5_000
"""Keys added at once: each takes two parameters of a statement, of which SQLite allows 32,766."""


def chunk_partitions(source: str) -> DynamicPartitionsDefinition:
    """Return the partitions of a source's chunks."""
    return DynamicPartitionsDefinition(name=partitions_name(source))


def register_chunks(instance: DagsterInstance, ledger: Ledger, source: str) -> int:
    """Add a partition for every chunk of the source that has none; return how many were added.

    May be repeated.

    Adopted files have none: no run ever packs or uploads one.
    """
    known = set(instance.get_dynamic_partitions(partitions_name(source)))
    missing = [
        chunk.name
        for chunk in ledger.chunks.list(source)
        if chunk.name not in known and not chunk.adopted
    ]
    for start in range(0, len(missing), KEYS_A_CALL):
        instance.add_dynamic_partitions(
            partitions_name(source), missing[start : start + KEYS_A_CALL]
        )
    return len(missing)
