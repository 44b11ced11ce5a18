"""Objects that a chunk's runs could not read."""

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
        """By key and version."""
        rows = self._rows(_OF_CHUNK, chunk=chunk)
        return {
            (row.file_path, row.object_version): ReadFailures(row.times, row.last_run)
            for row in rows
        }

    def count(self, chunk: str, objects: Sequence[tuple[str, str]], run: str) -> None:
        """Objects are (key, version). Each counts once for a run."""
        keys, versions = [key for key, _ in objects], [version for _, version in objects]
        values = {"chunk": chunk, "keys": keys, "versions": versions, "run": run}
        self._execute(query("count_read_failures"), **values)
