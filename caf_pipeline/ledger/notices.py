"""Keys that S3's event notifications named, until they are listed; and messages that are no such notification.

A key is noticed until a listing ends well that began after its latest event: `mark_noticed` when a listing begins,
`forget_noticed` when all that it has is planned or found to be known. In between a later event takes the mark away again.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from caf_pipeline.inventory.objects import is_supported
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.records import MessageSetApart

if TYPE_CHECKING:
    from caf_pipeline.source.protocol import QueueMessage

MOST_SET_APART: Final = 1_000
"""Messages of one source; more stay in the queue. A stranger who may send there must not fill the ledger."""

# A key's events are ordered by their sequencers where these have one length: S3's documentation has said of others that the
# shorter is padded at the left, and at the right. Where the order is not known, the key is listed once more.
_NOTICE: Final = """
    INSERT INTO noticed_keys AS old (source_id, file_path, sequencer)
    SELECT %(source_id)s, * FROM unnest(CAST(%(keys)s AS bytea[]), CAST(%(sequencers)s AS text[]))
    ON CONFLICT (source_id, file_path) DO UPDATE SET (sequencer, listing) = (SELECT
        CASE WHEN known THEN old.sequencer ELSE excluded.sequencer END, CASE WHEN known THEN old.listing END
        FROM (SELECT length(old.sequencer) = length(excluded.sequencer) AND old.sequencer >= excluded.sequencer
            AND excluded.sequencer <> '' AS known) AS compared)
    """
_MARK: Final = """
    UPDATE noticed_keys SET listing = %(listing)s FROM sources
    WHERE noticed_keys.source_id = sources.source_id AND sources.name = %(source)s
        AND file_path > %(after)s AND (CAST(%(until)s AS bytea) IS NULL OR file_path <= %(until)s)
    """
# A chunk that claimed an object before that came back from cold storage may skip it as cold: what came back is not forgotten
# before the chunk has ended.
_FORGET: Final = """
    DELETE FROM noticed_keys USING sources WHERE noticed_keys.source_id = sources.source_id AND sources.name = %(source)s
        AND listing = %(listing)s AND (CAST(%(until)s AS bytea) IS NULL OR file_path <= %(until)s)
        AND NOT CASE WHEN restored THEN EXISTS (SELECT FROM claims JOIN caf_files USING (caf_file_id)
            WHERE claims.source_id = noticed_keys.source_id AND claims.file_path = convert_from(noticed_keys.file_path, 'UTF8')
                AND caf_files.created_at < noticed_at) ELSE false END
    """
# Of these an event came since the listing began; those before it were listed, so that none of them waits any more.
_WAITS_SINCE: Final = """
    UPDATE noticed_keys SET noticed_at = least(%(began)s, now()) FROM sources
    WHERE noticed_keys.source_id = sources.source_id AND sources.name = %(source)s AND noticed_at < %(began)s
        AND file_path > %(after)s AND (CAST(%(until)s AS bytea) IS NULL OR file_path <= %(until)s)
    """
_SET_APART_BEFORE: Final = (
    "SELECT message_id FROM messages_set_apart WHERE source_id = %(source_id)s AND message_id = ANY(%(ids)s)"
)
_SET_APART: Final = """
    INSERT INTO messages_set_apart (source_id, message_id, body, reason)
    VALUES (%(source_id)s, %(message_id)s, %(body)s, %(reason)s)
    ON CONFLICT (source_id, message_id) DO NOTHING
    """


# S3 keeps the copy for the days that were asked for, maybe fewer than until the skip is due.
_RESTORED: Final = """
    UPDATE skipped_objects SET retry_at = now() WHERE source_id = %(source_id)s AND file_path = ANY(%(keys)s)
        AND reason = 'cold_storage' AND retry_at > now()
    """
_NOTE_RESTORED: Final = """
    UPDATE noticed_keys SET restored = true WHERE source_id = %(source_id)s
        AND file_path = ANY(SELECT convert_to(key, 'UTF8') FROM unnest(CAST(%(keys)s AS text[])) AS key)
    """
_QUEUE_TO_READ: Final = "INSERT INTO queue_reads (source_id) VALUES (%(source_id)s) ON CONFLICT (source_id) DO"


class Notices(LedgerPart):
    """What queues said."""

    def take_messages(self, source: str, messages: "Sequence[QueueMessage]") -> set[str]:
        """Write the keys that messages name, and set apart what is no event of the source, at once.

        Objects that were skipped for cold storage, or will be by a chunk under way, and are restored, are due at once.

        Returns the ids of the messages that are durable now: not of what would be set apart, where there is no more room.
        """
        events: dict[bytes, str] = {}
        for event in (each for message in messages for each in message.events):
            events[event.key] = _later(events.get(event.key, event.sequencer), event.sequencer)
        keys = sorted(events)  # two writers that take their rows in one order do not wait for each other
        with self._of_source(source) as (connection, source_id):
            if keys:
                facts = {"source_id": source_id, "keys": keys, "sequencers": [events[key] for key in keys]}
                connection.exec_driver_sql(_NOTICE, facts)
            restored = {event.key for message in messages for event in message.events if event.restored}
            if supported := sorted(key.decode() for key in restored if is_supported(key)):
                for statement in (_RESTORED, _NOTE_RESTORED):
                    connection.exec_driver_sql(statement, {"source_id": source_id, "keys": supported})
            wrong = {message.message_id: message for message in messages if message.wrong}
            facts = {"source_id": source_id, "ids": list(wrong)}
            known = (
                connection.exec_driver_sql(_SET_APART_BEFORE, facts).scalars().all()
            )  # whose deletion failed: they need no room
            for message_id in known:
                del wrong[message_id]
            count = "SELECT count(*) FROM messages_set_apart WHERE source_id = %(source_id)s"
            room = MOST_SET_APART - connection.exec_driver_sql(count, {"source_id": source_id}).scalar_one()
            left = set(list(wrong)[max(room, 0) :])
            for message_id in wrong.keys() - left:
                facts = {"message_id": message_id, "body": wrong[message_id].body, "reason": wrong[message_id].wrong}
                connection.exec_driver_sql(_SET_APART, {"source_id": source_id, **facts})
        return {message.message_id for message in messages} - left

    def record_queue(self, source: str, *, read: bool) -> None:
        """Record that the source's queue was read without an error.

        With `read` false: only that it is to be read from now on, where nothing was recorded yet.
        """
        done = "UPDATE SET read_at = now()" if read else "NOTHING"
        with self._of_source(source) as (connection, source_id):
            connection.exec_driver_sql(f"{_QUEUE_TO_READ} {done}", {"source_id": source_id})

    def mark_noticed(self, source: str, listing: str, after: bytes, until: bytes | None) -> None:
        """Write that a listing of keys greater than `after`, up to and including `until` (None: to the end), begins now.

        Does nothing where the ledger does not have the source.
        """
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_MARK, {"source": source, "listing": listing, "after": after, "until": until})

    def forget_noticed(self, source: str, listing: str, began: datetime, after: bytes, until: bytes | None) -> None:
        """Forget the keys greater than `after`, up to and including `until`, of which no event came since this listing began."""
        facts = {"source": source, "listing": listing, "began": began, "after": after, "until": until}
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_FORGET, facts)
            connection.exec_driver_sql(_WAITS_SINCE, facts)

    def noticed_keys(self, source: str, after: bytes, limit: int) -> Sequence[bytes]:
        """Return noticed keys greater than `after`, ascending by their bytes, at most `limit`."""
        statement = (
            "SELECT file_path FROM noticed_keys WHERE source_id = %(source_id)s AND file_path > %(after)s"
            " ORDER BY file_path LIMIT %(limit)s"
        )
        with self._of_source(source) as (connection, source_id):
            facts = {"source_id": source_id, "after": after, "limit": limit}
            return [bytes(key) for key in connection.exec_driver_sql(statement, facts).scalars().all()]

    def count_noticed(self, sources: Iterable[str]) -> Mapping[str, tuple[int, int]]:
        """Return how many keys are noticed and how many messages are set apart, of each of these sources that has any."""
        statement = """
            SELECT name, (SELECT count(*) FROM noticed_keys WHERE noticed_keys.source_id = sources.source_id) AS keys,
                (SELECT count(*) FROM messages_set_apart WHERE messages_set_apart.source_id = sources.source_id) AS messages
            FROM sources WHERE name = ANY(%(sources)s)
            """
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(statement, {"sources": list(sources)}).fetchall()
        return {row.name: (row.keys, row.messages) for row in rows if row.keys or row.messages}

    def messages_set_apart(self, source: str) -> Sequence[MessageSetApart]:
        """Return the messages of a source's queue that were set apart, the oldest first."""
        statement = (
            "SELECT message_id, body, reason, set_apart_at FROM messages_set_apart WHERE source_id = %(source_id)s"
            " ORDER BY set_apart_at, message_id"
        )
        with self._of_source(source) as (connection, source_id):
            return [MessageSetApart(**row._asdict()) for row in connection.exec_driver_sql(statement, {"source_id": source_id})]

    def remove_messages(self, source: str, message_ids: Sequence[str]) -> None:
        """Remove messages that were set apart."""
        statement = "DELETE FROM messages_set_apart WHERE source_id = %(source_id)s AND message_id = ANY(%(ids)s)"
        with self._of_source(source) as (connection, source_id):
            connection.exec_driver_sql(statement, {"source_id": source_id, "ids": list(message_ids)})


def _later(one: str, other: str) -> str:
    """Return the later one of two sequencers of a key, "" where their order is not known."""
    return max(one, other) if len(one) == len(other) else ""
