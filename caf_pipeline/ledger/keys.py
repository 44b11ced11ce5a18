"""Which keys of a source the ledger has rows of, page by page, in the order of their bytes. Nothing here writes.

Where a key's content is, and whether it still counts, is what `locate` says of the keys of a page.
"""

from collections.abc import Sequence
from typing import Final

from caf_pipeline.ledger.database import LedgerPart

# By the primary key, of which the index alone is read; a part of an object has a row like any object.
_KEYS: Final = """
    SELECT DISTINCT file_path FROM file_locations
    WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND file_path >= %(start)s{below}
    ORDER BY file_path LIMIT %(limit)s
"""


class ArchivedKeys(LedgerPart):
    """The keys of objects that are archived, or were."""

    def archived_keys(self, source: str, start: str, end: str | None, limit: int) -> Sequence[str]:
        """Return the first keys in `[start, end)`, by their bytes and at most `limit`; `end` None: no end.

        Both are text that the database holds: no NUL, no surrogate. Keys without a location in good standing may be among them.
        """
        statement = _KEYS.format(below=" AND file_path < %(end)s" if end is not None else "")
        values = {"source": source, "start": start, "end": end, "limit": limit}
        with self._database.reading() as connection:
            return [key for (key,) in connection.execute(statement, values)]
