"""Keys that S3's event notifications named until they are listed, and invalid messages.

A listing that begins marks the noticed keys. When all that it lists is planned or known, the marked
keys are removed. A later event removes its key's mark.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from sqlalchemy import (
    BigInteger,
    LargeBinary,
    Text,
    Update,
    and_,
    any_,
    bindparam,
    delete,
    func,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert

from caf_pipeline.inventory.objects import is_supported
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.records import MessageSetApart
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.ledger.tables import (
    MESSAGES_SET_APART,
    NOTICED_KEYS,
    QUEUE_READS,
    SKIPPED_OBJECTS,
    SOURCES,
    TIMESTAMPTZ,
)

if TYPE_CHECKING:
    from caf_pipeline.source.protocol import QueueMessage

MOST_SET_APART: Final = 1_000
"""A source's further messages stay in the queue: no stranger can fill the ledger."""

_AFTER_KEY: Final = and_(
    NOTICED_KEYS.c.source_id == SOURCES.c.source_id,
    SOURCES.c.name == bindparam("source"),
    NOTICED_KEYS.c.file_path > bindparam("after"),
)
_MARK: Final = update(NOTICED_KEYS).where(_AFTER_KEY).values(listing=bindparam("listing"))
# An event came since the listing began. The listing covers all earlier events of the key.
_WAITS_SINCE: Final = (
    update(NOTICED_KEYS)
    .where(_AFTER_KEY, NOTICED_KEYS.c.noticed_at < bindparam("began"))
    .values(noticed_at=func.least(bindparam("began", type_=TIMESTAMPTZ), func.now()))
)
_NOTICED: Final = (
    select(NOTICED_KEYS.c.file_path)
    .where(
        NOTICED_KEYS.c.source_id == bindparam("source_id"),
        NOTICED_KEYS.c.file_path > bindparam("after"),
    )
    .order_by(NOTICED_KEYS.c.file_path)
    .limit(bindparam("most", type_=BigInteger))
)
_COUNTS: Final = select(
    SOURCES.c.name,
    select(func.count())
    .where(NOTICED_KEYS.c.source_id == SOURCES.c.source_id)
    .scalar_subquery()
    .label("keys"),
    select(func.count())
    .where(MESSAGES_SET_APART.c.source_id == SOURCES.c.source_id)
    .scalar_subquery()
    .label("messages"),
).where(SOURCES.c.name == any_(bindparam("sources", type_=ARRAY(Text))))

_OF_SOURCE: Final = MESSAGES_SET_APART.c.source_id == bindparam("source_id")
_OF_IDS: Final = MESSAGES_SET_APART.c.message_id == any_(bindparam("ids", type_=ARRAY(Text)))
_SET_APART_BEFORE: Final = select(MESSAGES_SET_APART.c.message_id).where(_OF_SOURCE, _OF_IDS)
_SET_APART: Final = insert(MESSAGES_SET_APART).on_conflict_do_nothing(
    index_elements=[MESSAGES_SET_APART.c.source_id, MESSAGES_SET_APART.c.message_id]
)
_COUNT_SET_APART: Final = select(func.count()).where(_OF_SOURCE)
_MESSAGES: Final = (
    select(
        MESSAGES_SET_APART.c.message_id,
        MESSAGES_SET_APART.c.body,
        MESSAGES_SET_APART.c.reason,
        MESSAGES_SET_APART.c.set_apart_at,
    )
    .where(_OF_SOURCE)
    .order_by(MESSAGES_SET_APART.c.set_apart_at, MESSAGES_SET_APART.c.message_id)
)
_REMOVE: Final = delete(MESSAGES_SET_APART).where(_OF_SOURCE, _OF_IDS)

# S3 keeps the restored copy for a limited time, which may end before the skip is due.
_RESTORED: Final = (
    update(SKIPPED_OBJECTS)
    .where(
        SKIPPED_OBJECTS.c.source_id == bindparam("of_source"),
        SKIPPED_OBJECTS.c.file_path == any_(bindparam("keys", type_=ARRAY(Text))),
        SKIPPED_OBJECTS.c.reason == "cold_storage",
        SKIPPED_OBJECTS.c.retry_at > func.now(),
    )
    .values(retry_at=func.now())
)
_NOTE_RESTORED: Final = (
    update(NOTICED_KEYS)
    .where(
        NOTICED_KEYS.c.source_id == bindparam("of_source"),
        NOTICED_KEYS.c.file_path == any_(bindparam("keys", type_=ARRAY(LargeBinary))),
    )
    .values(restored=true())
)
_QUEUE: Final = insert(QUEUE_READS)
_QUEUE_READ: Final = _QUEUE.on_conflict_do_update(
    index_elements=[QUEUE_READS.c.source_id], set_={"read_at": func.now()}
)
_QUEUE_TO_READ: Final = _QUEUE.on_conflict_do_nothing(index_elements=[QUEUE_READS.c.source_id])


class Notices(LedgerPart):
    """Keeps noticed keys and messages set apart."""

    def take_messages(self, source: str, messages: "Sequence[QueueMessage]") -> set[str]:
        """Write the keys that messages name, and set apart other messages.

        A restored object that was skipped for cold storage, or that a chunk under way will skip, is
        due now. Returns the ids of the durable messages, without those that do not fit in.
        """
        events = [event for message in messages for event in message.events]
        latest: dict[bytes, str] = {}
        for event in events:
            # Sequencers of different lengths have no order: "".
            other = latest.get(event.key, event.sequencer)
            is_ordered = len(other) == len(event.sequencer)
            latest[event.key] = max(other, event.sequencer) if is_ordered else ""
        keys = sorted(latest)  # one order for all writers prevents deadlocks
        with self._of_source(source) as (connection, source_id):
            if keys:
                sequencers = [latest[key] for key in keys]
                values = {"source_id": source_id, "keys": keys, "sequencers": sequencers}
                connection.exec_driver_sql(query("notice_keys"), values)
            restored = {event.key for event in events if event.restored}
            if supported := sorted(filter(is_supported, restored)):
                connection.execute(
                    _RESTORED, {"of_source": source_id, "keys": [key.decode() for key in supported]}
                )
                connection.execute(_NOTE_RESTORED, {"of_source": source_id, "keys": supported})
            wrong = {message.message_id: message for message in messages if message.wrong}
            set_apart = connection.execute(
                _SET_APART_BEFORE, {"source_id": source_id, "ids": list(wrong)}
            )
            for message_id in set_apart.scalars():  # their deletion failed; they need no room
                del wrong[message_id]
            count = connection.execute(_COUNT_SET_APART, {"source_id": source_id}).scalar_one()
            refused = set(list(wrong)[max(MOST_SET_APART - count, 0) :])
            for message_id in wrong.keys() - refused:
                message = wrong[message_id]
                values = {"message_id": message_id, "body": message.body, "reason": message.wrong}
                connection.execute(_SET_APART, {"source_id": source_id, **values})
        return {message.message_id for message in messages} - refused

    def record_queue(self, source: str, *, read: bool) -> None:
        """`read` False: the queue is to be read from now on, unless a time is recorded."""
        with self._of_source(source) as (connection, source_id):
            connection.execute(_QUEUE_READ if read else _QUEUE_TO_READ, {"source_id": source_id})

    def mark_noticed(self, source: str, listing: str, after: bytes, until: bytes | None) -> None:
        """A listing of keys in `(after, until]` begins. An unknown source is ignored."""
        self._execute(_up_to(until, _MARK), source=source, listing=listing, after=after)

    def forget_noticed(
        self, source: str, listing: str, began: datetime, after: bytes, until: bytes | None
    ) -> None:
        """Forget keys in `(after, until]` that had no event since the listing began."""
        with self._engine.begin() as connection:
            connection.exec_driver_sql(
                query("forget_noticed"), {"source": source, "listing": listing, "until": until}
            )
            connection.execute(
                _up_to(until, _WAITS_SINCE), {"source": source, "began": began, "after": after}
            )

    def noticed_keys(self, source: str, after: bytes, limit: int) -> Sequence[bytes]:
        with self._of_source(source) as (connection, source_id):
            return (
                connection.execute(
                    _NOTICED, {"source_id": source_id, "after": after, "most": limit}
                )
                .scalars()
                .all()
            )

    def count_noticed(self, sources: Iterable[str]) -> Mapping[str, tuple[int, int]]:
        """Numbers of noticed keys and of messages set apart, by source."""
        rows = self._rows(_COUNTS, sources=list(sources))
        return {row.name: (row.keys, row.messages) for row in rows if row.keys or row.messages}

    def messages_set_apart(self, source: str) -> Sequence[MessageSetApart]:
        with self._of_source(source) as (connection, source_id):
            return [
                MessageSetApart(**row._asdict())
                for row in connection.execute(_MESSAGES, {"source_id": source_id})
            ]

    def remove_messages(self, source: str, message_ids: Sequence[str]) -> None:
        with self._of_source(source) as (connection, source_id):
            connection.execute(_REMOVE, {"source_id": source_id, "ids": list(message_ids)})


def _up_to(until: bytes | None, statement: Update) -> Update:
    return statement if until is None else statement.where(NOTICED_KEYS.c.file_path <= until)
