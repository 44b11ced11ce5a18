"""Which keys of a source the ledger has rows of, page by page, in the order of their bytes. Nothing here writes.

Where a key's content is, and whether it still counts, is what `locate` says of the keys of a page.
"""

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote_from_bytes

from psycopg.rows import args_row

from caf_pipeline.inventory.objects import can_be_stored, is_supported
from caf_pipeline.ledger.copy import GOOD, KEY
from caf_pipeline.ledger.current_content import still_skipped
from caf_pipeline.ledger.database import LedgerPart
from caf_pipeline.ledger.records import NotArchived

# By the primary key, of which the index alone is read; a part of an object has a row like any object.
_KEYS: Final = """
    SELECT DISTINCT file_path FROM file_locations
    WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND file_path >= %(start)s{below}
    ORDER BY file_path LIMIT %(limit)s
"""
_SOURCE_ID: Final = "(SELECT source_id FROM sources WHERE name = %(source)s)"
_OF_KEY: Final = f"source_id = {_SOURCE_ID} AND file_path = %(key)s"
# Of a part that waits for others a claim tells.
_NOT_ARCHIVED: Final = f"""
    SELECT object_version, chunk, state, detail, retry_at, is_over FROM (
        SELECT object_version(version_id, etag, size_bytes, rewritten_at) AS object_version, name AS chunk, state,
            '' AS detail, NULL::timestamptz AS retry_at, false AS is_over, last_modified
        FROM claims JOIN chunks USING (caf_file_id) WHERE claims.{_OF_KEY}
        UNION ALL
        SELECT object_version(version_id, etag, size_bytes, rewritten_at), NULL, reason, detail,
            CASE WHEN isfinite(retry_at) THEN retry_at END,
            NOT (reason = 'waiting' OR {still_skipped(_SOURCE_ID)}), coalesce(last_modified, last_at)
        FROM skipped_objects WHERE {_OF_KEY}
        UNION ALL
        SELECT object_version(version_id, etag, size_bytes, rewritten_at), name, state, '', NULL, false, last_modified
        FROM file_locations JOIN chunks USING (caf_file_id)
        WHERE file_locations.{_OF_KEY} AND state <> ALL(%(good)s)) AS known
    ORDER BY last_modified DESC NULLS LAST
"""
# What waits has a row of both while a chunk claims it.
_COUNT_NOT_ARCHIVED: Final = f"""
    SELECT count(*) FILTER (WHERE pending) AS pending, count(*) FILTER (WHERE NOT pending) AS skipped FROM (
        SELECT {KEY}, true AS pending FROM claims WHERE source_id = {_SOURCE_ID} AND {{plain}}
        UNION SELECT {KEY}, reason = 'waiting' FROM skipped_objects
        WHERE source_id = {_SOURCE_ID} AND {{plain}} AND reason <> 'unsupported_key'
            AND (reason = 'waiting' OR {still_skipped(_SOURCE_ID)})
        UNION SELECT {KEY}, false FROM skipped_objects
        WHERE source_id = {_SOURCE_ID} AND {{encoded}} AND reason = 'unsupported_key' AND {still_skipped(_SOURCE_ID)}) AS found
"""

KeyRange = tuple[str, str | None]
"""Keys from the first text on and below the second (None: without an end), by their bytes; text that the database holds."""


class ArchivedKeys(LedgerPart):
    """The keys of objects that are archived, or were."""

    def archived_keys(self, source: str, start: str, end: str | None, limit: int) -> Sequence[str]:
        """Return the first keys in `[start, end)`, by their bytes and at most `limit`; `end` None: no end.

        Both are text that the database holds: no NUL, no surrogate. Keys without a location in good standing may be among them.
        """
        if not can_be_stored(source):
            return []
        statement = _KEYS.format(below=" AND file_path < %(end)s" if end is not None else "")
        values = {"source": source, "start": start, "end": end, "limit": limit}
        with self._database.reading() as connection:
            return [key for (key,) in connection.execute(statement, values)]

    def count_not_archived(self, source: str, plain: KeyRange, encoded: KeyRange) -> tuple[int, int]:
        """Return how many objects are still to be archived, and how many were skipped.

        Counted are keys in the range `plain`, and unsupported ones in the range `encoded` of what they are recorded as.
        """
        if not can_be_stored(source):
            return 0, 0
        values = {"source": source, "start": plain[0], "end": plain[1], "encoded_start": encoded[0], "encoded_end": encoded[1]}
        within = {"plain": _within(plain, ""), "encoded": _within(encoded, "encoded_")}
        with self._database.reading() as connection:
            pending, skipped = connection.execute(_COUNT_NOT_ARCHIVED.format(**within), values).fetchone() or (0, 0)
        return pending, skipped

    def not_archived(self, source: str, key: str) -> Sequence[NotArchived]:
        """Return what is known of the identities of a key that are not located: claimed, skipped, or of a chunk that is lost.

        Those that were modified last come first.
        The key may hold bytes that are not UTF-8, as names of the operating system do (`os.fsdecode`).
        """
        try:
            encoded = key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return []
        if not can_be_stored(source):
            return []
        recorded = key if is_supported(encoded) else quote_from_bytes(encoded)
        with self._database.reading() as connection:
            cursor = connection.cursor(row_factory=args_row(NotArchived))
            values = {"source": source, "key": recorded, "good": GOOD}
            return cursor.execute(_NOT_ARCHIVED, values).fetchall()


def _within(keys: KeyRange, name: str) -> str:
    """Return the condition of a range, by its parameters."""
    return f"file_path >= %({name}start)s" + (f" AND file_path < %({name}end)s" if keys[1] is not None else "")
