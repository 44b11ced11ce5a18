"""Objects that runs of a chunk could not read."""

from collections.abc import Mapping, Sequence
from typing import Final

from sqlalchemy import bindparam, select

from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import ReadFailures
from caf_pipeline.ledger.tables import CAF_FILES, READ_FAILURES

_OF_CHUNK: Final = (
    select(
        READ_FAILURES.c.file_path,
        READ_FAILURES.c.object_version,
        READ_FAILURES.c.times,
        READ_FAILURES.c.last_run,
    )
    .join_from(READ_FAILURES, CAF_FILES)
    .where(CAF_FILES.c.name == bindparam("chunk"))
)


class FailedReads(LedgerPart):
    """Counts the runs that failed on an object."""

    def list(self, chunk: str) -> Mapping[tuple[str, str], ReadFailures]:
        """Return the objects of the chunk that runs failed on, by key and version."""
        with self._engine.begin() as connection:
            rows = connection.execute(_OF_CHUNK, {"chunk": chunk}).all()
        return {
            (key, version): ReadFailures(times, last_run) for key, version, times, last_run in rows
        }

    def count(self, chunk: str, objects: Sequence[tuple[str, str]], run: str) -> None:
        """Count a run of the chunk that failed on these objects, by key and version; a run counts
        once for each object.
        """
        keys, versions = [key for key, _ in objects], [version for _, version in objects]
        with self._engine.begin() as connection:
            values = {"chunk": chunk, "keys": keys, "versions": versions, "run": run}
            connection.exec_driver_sql(query("count_read_failures"), values)
