"""Lookups for readers: where the content of keys is, and whether it is current in the bucket.

Uses psycopg alone, since loading SQLAlchemy takes longer than reading an object (decision 30), and
only the right to SELECT. One round trip answers any number of
keys at one moment. Source: "Which objects are archived" in docs/explanation/design.md.
"""

import contextlib
import os
import re
import select
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import quote_from_bytes

import psycopg
from psycopg.rows import args_row, scalar_row

from caf_pipeline.chunk_state import GOOD
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.inventory.objects import LEAST, can_be_stored, is_supported
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.records import (
    ChunkHeader,
    Currency,
    EncryptedChunk,
    ListedObject,
    LocatedRange,
    Location,
    NotArchived,
    require_zone,
)
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.records import PostRecord, ProviderRecord
from caf_pipeline.waits import Waits

_SNAPSHOT_TIME: Final = re.compile(r".*-(\d{8}T\d{12}Z)")
_LOOK_UP: Final = "SELECT * FROM look_up(%(source)s, %(keys)s, %(good)s)"

KeyRange = tuple[str, str | None]
"""From the first key to the second, exclusive, in byte order. None: no upper bound."""


class LookupRow(NamedTuple):
    """A row of the database's function look_up, described in sql/."""

    kind: str
    key: str
    object_version: str
    moment: datetime
    chunk: str
    state: str
    inventory: str
    version_id: str | None
    start_byte: int
    end_byte: int
    etag: str
    sha256: bytes
    merkle_root: bytes
    owner: str
    start: int
    stored_size_bytes: int
    parts: Sequence[Mapping[str, Any]] | None
    header_set: bytes | None
    from_unknown_post: bool


class Lookup:
    """Answers readers' questions. Writes nothing. Safe in threads."""

    def __init__(self, database: Database) -> None:
        self._connections = ReadConnections(database)

    def bring_up(self, waits: Waits) -> None:
        with self._connections.connection() as connection:
            self._connections.database.bring_up(connection, waits)

    def close(self) -> None:
        """A later query opens new connections."""
        self._connections.close()

    def sources(self) -> Sequence[str]:
        return self._column("SELECT name FROM sources ORDER BY name", {})

    def _column(self, statement: str, values: Mapping[str, Any]) -> list[Any]:
        with self._connections.connection() as connection:
            return connection.cursor(row_factory=scalar_row).execute(statement, values).fetchall()

    def locate(
        self,
        source: str,
        key: str,
        object_version: str | None = None,
        *,
        as_of: datetime | None = None,
    ) -> Location | None:
        """Like `locate_many`. The location of a version has no currency."""
        if object_version is None:
            return self.locate_many(source, [key], last_seen=True, as_of=as_of).get(key)
        if not can_be_stored(key):
            return None
        with self._connections.connection() as connection:
            rows = _look_up(connection, source, [key])
        versions = [
            row for row in rows if row.kind == "location" and row.object_version == object_version
        ]
        if not versions:
            return None
        return _location(min(versions, key=lambda row: row.from_unknown_post))

    def locate_many(
        self,
        source: str,
        keys: Iterable[str],
        *,
        last_seen: bool = False,
        as_of: datetime | None = None,
    ) -> Mapping[str, Location]:
        """Return the current location of each archived key.

        Current is the content that the latest exception names, or the content with the greatest
        last_modified if that is later. If it is not located, or the key is gone, the result is the
        located content with the greatest last_modified, and `currency` shows that. Only chunks in
        good standing count. Content of unknown posts counts only for keys without other content,
        and is never called current. All results are in memory.

        `last_seen` adds when a key that is gone was last listed, in one more round trip each.
        Content modified or stated after `as_of` does not count.
        """
        supported = list(filter(can_be_stored, keys))
        rows: Mapping[str, defaultdict[str, list[LookupRow]]] = {
            kind: defaultdict(list) for kind in ("location", "exception", "pending", "next")
        }
        located = {}
        with self._connections.connection() as connection:
            for row in _look_up(connection, source, supported, as_of):
                rows[row.kind][row.key].append(row)
            for key, versions in rows["location"].items():
                exceptions, pending = rows["exception"].get(key, ()), rows["pending"].get(key, ())
                own_versions = [row for row in versions if not row.from_unknown_post]
                chosen, in_force = _choose(
                    own_versions or versions, exceptions, rows["next"].get(key, ())
                )
                currency = (
                    _currency(chosen, in_force, pending, as_of)
                    if own_versions
                    else Currency(is_current=False, as_of=as_of)
                )
                if last_seen and in_force and currency.gone_at:
                    seen_at = _last_seen(connection, source, chosen, in_force)
                    currency = replace(currency, last_seen=seen_at)
                located[key] = _location(chosen, currency, len(versions) - 1)
        return located

    def locate_versions(self, source: str, keys: Iterable[str]) -> Mapping[str, Sequence[Location]]:
        """Each key's versions: that of `locate_many`, then newest first."""
        supported = list(filter(can_be_stored, keys))
        current = self.locate_many(source, supported)
        others = defaultdict(list)
        with self._connections.connection() as connection:
            for row in _look_up(connection, source, supported):
                if row.kind == "location" and row.key in current:
                    others[row.key].append(row)
        versions = {}
        for key, first in current.items():
            older = [row for row in others[key] if row.object_version != first.row.object_version]
            older.sort(
                key=lambda row: (row.moment, row.inventory, row.object_version), reverse=True
            )
            versions[key] = [first, *(_location(row, Currency(is_current=False)) for row in older)]
        return versions

    def versions(self, source: str, key: str, limit: int) -> tuple[Sequence[LocationRow], int]:
        """Located versions, latest first, and their total number."""
        if not can_be_stored(source) or not can_be_stored(key):
            return [], 0
        values = {"source": source, "key": key, "good": GOOD, "limit": limit}
        with self._connections.connection() as connection:
            rows = connection.execute(query("located_versions"), values).fetchall()
        versions = [LocationRow(*columns) for *columns, _ in rows]
        return [
            replace(version, last_modified=version.last_modified.astimezone(UTC))
            for version in versions
        ], rows[0][-1] if rows else 0

    def archived_keys(self, source: str, start: str, end: str, limit: int) -> Sequence[str]:
        """In byte order, from `[start, end)`. They may have no location in good standing."""
        if not can_be_stored(source):
            return []
        return self._column(
            query("archived_keys"), {"source": source, "start": start, "end": end, "limit": limit}
        )

    def spelled_in_any_case(self, source: str, key: str) -> Sequence[str]:
        """Return the longest beginnings of a key that archived keys have, in any case; at most 16.

        They are as long as the key if archived keys begin with the whole key.
        """
        if not can_be_stored(source) or not can_be_stored(key):
            return []
        swapped = (character.swapcase() for character in key)
        # Some characters become several, such as a sharp s.
        pairs = zip(key, swapped, strict=True)
        values = {
            "source": source,
            "key": key,
            "swapped": "".join(other if len(other) == 1 else same for same, other in pairs),
        }
        return self._column(query("spelled_in_any_case"), values)

    def list_page(
        self, source: str, start: str, end: str, limit: int
    ) -> tuple[Sequence[ListedObject], str | None]:
        """Return the objects of the first keys in `[start, end)`, in byte order.

        Also returns where the next page begins; None if there is none. The objects are those of
        `locate_many`, which is asked only for the few keys with more than one row in good standing.
        `limit` counts rows.
        """
        if not can_be_stored(source):
            return [], None
        values = {"source": source, "start": start, "end": end, "limit": limit, "good": GOOD}
        with self._connections.connection() as connection:
            cursor = connection.cursor(binary=True).execute(query("list_page"), values)
            rows = defaultdict(list)
            for kind, *facts in cursor.fetchall():
                rows[kind].append(facts)
        chunks = {facts[-1]: facts[:1] for facts in rows["chunk"]}
        others = {facts[0] for facts in rows["other"]}
        objects: dict[str, ListedObject | None] = {}
        for key, size, modified, etag, version, version_id, sha256, part, chunk in rows["row"]:
            if part or chunk not in chunks or key in others or key in objects:
                objects[key] = None
            else:
                objects[key] = ListedObject(
                    key, size, modified, "current", etag, version, version_id, sha256, chunks[chunk]
                )
        following = None
        if len(rows["row"]) == limit:  # the last key may have more rows
            following = rows["row"][-1][0]
            if len(objects) > 1:
                del objects[following]
            else:
                objects[following], following = None, f"{following}{LEAST}"
        located = self.locate_many(source, [key for key, listed in objects.items() if not listed])
        return [
            listed or ListedObject.of(located[key])
            for key, listed in objects.items()
            if listed or key in located
        ], following

    def count_not_archived(
        self, source: str, plain: KeyRange, encoded: KeyRange
    ) -> tuple[int, int]:
        """Return how many objects are still to be archived, and how many were skipped.

        `encoded` is the range of unsupported objects' percent-encoded keys.
        """
        if not can_be_stored(source):
            return 0, 0
        # A constant shows the planner how small the source is.
        source_ids = self._column(
            "SELECT source_id FROM sources WHERE name = %(source)s", {"source": source}
        )
        values = {
            "source_id": next(iter(source_ids), None),
            "start": plain[0],
            "end": plain[1],
            "encoded_start": encoded[0],
            "encoded_end": encoded[1],
        }
        with self._connections.connection() as connection:
            counts = connection.execute(query("count_not_archived"), values).fetchone()
        return (counts[0], counts[1]) if counts else (0, 0)

    def not_archived(self, source: str, key: str) -> Sequence[NotArchived]:
        """Return a key's identities that are claimed, skipped, or in a lost chunk, latest first.

        The key may contain any bytes, as `os.fsdecode` returns them.
        """
        try:
            encoded = key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return []
        if not can_be_stored(source):
            return []
        recorded = key if is_supported(encoded) else quote_from_bytes(encoded)
        values = {"source": source, "key": recorded, "good": GOOD}
        with self._connections.connection() as connection:
            cursor = connection.cursor(row_factory=args_row(NotArchived))
            return cursor.execute(query("not_archived"), values).fetchall()

    def header_sets(self, names: Collection[bytes]) -> Mapping[bytes, ObjectHeaders]:
        with self._connections.connection() as connection:
            cursor = connection.cursor(binary=True)
            rows = cursor.execute(query("header_sets"), {"names": list(names)}).fetchall()
        return {name: ObjectHeaders(*values) for name, *values in rows}

    def chunk_header(self, merkle_root: bytes) -> ChunkHeader | None:
        """None if the chunk is not encrypted."""
        statement = (
            "SELECT header, nonce, caf_size_bytes, coalesce(recipients, '{}') "
            "FROM caf_files JOIN chunk_copies "
            "USING (caf_file_id) WHERE merkle_root = %(merkle_root)s AND header IS NOT NULL"
        )
        with self._connections.connection() as connection:
            cursor = connection.cursor(row_factory=args_row(ChunkHeader))
            return cursor.execute(statement, {"merkle_root": merkle_root}).fetchone()

    def encrypted_chunks(self, source: str) -> Sequence[EncryptedChunk]:
        """Return those that the source's objects need, by name."""
        statement = (
            "SELECT chunks.name, header, nonce, chunks.caf_size_bytes, merkle_root, owner, "
            "CASE WHEN caf_files.state = 'located' THEN start END, chunks.stored_size_bytes, "
            "recipients FROM chunks JOIN caf_files USING (caf_file_id) "
            "JOIN sources ON sources.source_id = chunks.source_id "
            "WHERE sources.name = %(source)s AND header IS NOT NULL "
            "AND chunk_state IN ('sealed', 'located', 'parked') ORDER BY chunks.name"
        )
        with self._connections.connection() as connection:
            rows = connection.cursor().execute(statement, {"source": source}).fetchall()
        return [
            EncryptedChunk(
                name,
                ChunkHeader(header, nonce, caf_bytes, recipients or ()),
                PostRecord(root, owner, start, stored_bytes) if start is not None else None,
            )
            for name, header, nonce, caf_bytes, root, owner, start, stored_bytes, recipients in rows
        ]

    def encrypted_chunk(self, source: str) -> str | None:
        """The first located. None if all are plain."""
        statement = (
            "SELECT caf_files.name FROM caf_files JOIN sources USING (source_id) WHERE "
            "sources.name = %(source)s AND state = 'located' AND header IS NOT NULL "
            "ORDER BY caf_files.name LIMIT 1"
        )
        return next(iter(self._column(statement, {"source": source})), None)

    def unread_chunks(self, source: str) -> Mapping[str, str]:
        """Return the chunks that a rebuild restored and that were not read whole since.

        The value is the chunk's damage, or "".
        """
        if not can_be_stored(source):
            return {}
        statement = (
            "SELECT caf_files.name, damage FROM caf_files JOIN chunk_copies USING (caf_file_id) "
            "JOIN sources USING (source_id) WHERE sources.name = %(source)s "
            "AND caf_files.state = 'located' AND unread IS NOT NULL"
        )
        with self._connections.connection() as connection:
            return dict(connection.execute(statement, {"source": source}).fetchall())

    def chunks_with_log_times(self, chunks: Collection[str]) -> Collection[str]:
        statement = "SELECT name FROM caf_files WHERE name = ANY(%(chunks)s) AND has_log_times"
        return set(self._column(statement, {"chunks": list(chunks)}))

    def log_times(
        self, locations: Sequence[Location]
    ) -> Mapping[int, tuple[int | None, int | None]]:
        """First and last times, by position in `locations`, if known."""
        values = {
            "chunks": [location.chunk for location in locations],
            "starts": [location.row.start_byte for location in locations],
        }
        with self._connections.connection() as connection:
            rows = connection.execute(query("log_times"), values).fetchall()
        # An empty object has the start of the next object.
        return {
            number - 1: (first_ms, last_ms)
            for number, first_ms, last_ms in rows
            if locations[number - 1].size_bytes
        }

    def provider_records(self) -> Mapping[str, ProviderRecord]:
        statement = (
            "SELECT provider, upload_rate, download_rate, failures, failed_at "
            "FROM providers ORDER BY provider"
        )
        with self._connections.connection() as connection:
            cursor = connection.cursor(row_factory=args_row(ProviderRecord)).execute(statement)
            return {record.provider: record for record in cursor}

    def seen_height(self, chain_id: str) -> int:
        heights = self._column(
            "SELECT height FROM chain_heights WHERE chain_id = %(chain_id)s", {"chain_id": chain_id}
        )
        return max(heights, default=0)

    def folder_store(self) -> str | None:
        return next(iter(self._column("SELECT id FROM folder_store", {})), None)


def _look_up(
    connection: psycopg.Connection, source: str, keys: Sequence[str], as_of: datetime | None = None
) -> Sequence[LookupRow]:
    """Rows after `as_of` are left out, but for each key's first later statement ('next')."""
    require_zone(as_of)
    if not can_be_stored(source):
        return []
    cursor = connection.cursor(binary=True, row_factory=args_row(LookupRow))
    if as_of is None:
        return cursor.execute(_LOOK_UP, {"source": source, "keys": keys, "good": GOOD}).fetchall()
    values = {"source": source, "keys": keys, "as_of": as_of, "good": GOOD}
    rows = cursor.execute(query("look_up_as_of"), values).fetchall()
    own_keys = {row.key for row in rows if row.kind == "location" and not row.from_unknown_post}
    # The LastModified of a claim or skip may be unknown (None).
    return [
        row
        for row in rows
        if row.kind == "next"
        or (
            (row.moment is not None and row.moment <= as_of)
            and not (row.from_unknown_post and row.key in own_keys)
        )
    ]


_posting: Final = lru_cache(64)(PostRecord)  # objects that are read together are in few chunks


def _location(
    row: LookupRow, currency: Currency | None = None, older_versions: int = 0
) -> Location:
    location = LocationRow(
        row.key,
        row.object_version,
        row.version_id,
        row.start_byte,
        row.end_byte,
        row.etag,
        row.moment.astimezone(UTC),
        row.sha256,
        row.header_set,
    )
    posting = _posting(row.merkle_root, row.owner, row.start, row.stored_size_bytes)
    parts = [
        LocatedRange(
            part["start_byte"],
            part["end_byte"],
            bytes.fromhex(part["sha256"]),
            part["chunk"],
            PostRecord(
                bytes.fromhex(part["merkle_root"]),
                part["owner"],
                part["start"],
                part["stored_size_bytes"],
            ),
        )
        for part in row.parts or ()
    ]
    return Location(
        location, row.chunk, posting, currency, parts, older_versions, row.from_unknown_post
    )


# S3's times have a resolution of a second. Of two versions of the same second, the version that was
# listed later is current: a snapshot's name ends with its time. This does not depend on the order
# of plans or loads, so a rebuilt ledger agrees. As of a time before an inventory settled it, the
# version that the inventory names is current.
def _choose(
    versions: Sequence[LookupRow], exceptions: Sequence[LookupRow], stated_next: Sequence[LookupRow]
) -> tuple[LookupRow, LookupRow | None]:
    if len(versions) == 1 and not exceptions:  # the case of nearly all keys
        return versions[0], None
    latest = max(row.moment for row in versions)
    in_force = next((row for row in exceptions if row.moment >= latest), None)
    named = in_force and in_force.object_version
    named_next = next((row.object_version for row in stated_next), None)

    def order(row: LookupRow) -> tuple[Any, ...]:
        version = row.object_version
        return version == named, row.moment, version == named_next, row.inventory, version

    return max(versions, key=order), in_force


_CURRENT: Final = Currency(is_current=True)


def _currency(
    chosen: LookupRow,
    in_force: LookupRow | None,
    pending: Sequence[LookupRow],
    as_of: datetime | None,
) -> Currency:
    if not in_force and not pending:
        return Currency(is_current=True, as_of=as_of) if as_of else _CURRENT
    since = (in_force or chosen).moment.astimezone(UTC)
    for other in pending:
        if other.object_version == chosen.object_version:
            continue
        is_newer = other.chunk is not None if other.moment is None else other.moment > since
        if is_newer or (in_force and other.object_version == in_force.object_version):
            return Currency(is_current=False, chunk=other.chunk, state=other.state, as_of=as_of)
    if in_force is None or in_force.object_version == chosen.object_version:
        return Currency(is_current=True, as_of=as_of)
    return Currency(
        is_current=False, gone_at=since if in_force.object_version is None else None, as_of=as_of
    )


def _last_seen(
    connection: psycopg.Connection, source: str, location: LookupRow, gone: LookupRow
) -> datetime | None:
    values = {"source": source, "inventory": gone.inventory, "key": location.key.encode()}
    times: list[datetime | None] = [
        *(connection.execute(query("last_seen"), values).fetchone() or ())
    ]
    planned_by = {"source": source, "name": location.inventory}
    inventory = connection.execute(query("inventory_time"), planned_by).fetchone()
    if inventory:
        times += inventory
    elif match := _SNAPSHOT_TIME.fullmatch(location.inventory):
        times.append(datetime.strptime(match[1], "%Y%m%dT%H%M%S%fZ").replace(tzinfo=UTC))
    return max((time.astimezone(UTC) for time in times if time), default=None)


KEPT_IDLE: Final = 2
UNTESTED_SECONDS: Final = 1.0
"""Seconds for which an idle connection needs no test."""
PREPARED_FROM: Final = 3
"""Executions of a statement after which the server keeps its plan."""


class ReadConnections:
    """A pool of connections in autocommit mode. Safe in threads and after a fork.

    Not psycopg_pool: its waiting callers do not learn that the server refuses.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._has_pooler = False
        self._forget_connections()

    def _forget_connections(self) -> None:
        self._process = os.getpid()
        # Last in, first out. `append` and `pop` are atomic.
        self._idle: list[tuple[float, psycopg.Connection]] = []

    @contextlib.contextmanager
    def connection(self) -> Iterator[psycopg.Connection]:
        if self._process != os.getpid():
            # After a fork, two processes on one connection would read each other's answers.
            self._forget_connections()
        with self.database.translated():
            connection = self._idle_connection() or self.database.connect()
            try:
                yield connection
            except BaseException:  # a statement may be under way
                connection.close()
                raise
            if len(self._idle) >= KEPT_IDLE:
                connection.close()
            else:
                self._idle.append((time.monotonic(), connection))

    def _idle_connection(self) -> psycopg.Connection | None:
        """If a connection is broken, close all of them."""
        with contextlib.suppress(IndexError):
            idle_since, connection = self._idle.pop()
            try:
                # A closed connection has something to read. A server that vanished sends nothing,
                # so a connection that was idle for longer is tested.
                is_long_idle = time.monotonic() - idle_since > UNTESTED_SECONDS
                if connection.prepare_threshold is None and not self._has_pooler:
                    self._prepare_statements(connection)
                elif is_long_idle or _has_something_to_read(connection):
                    connection.execute("SELECT 1")
                return connection
            except psycopg.Error:
                connection.close()
                self.close()
        return None

    def _prepare_statements(self, connection: psycopg.Connection) -> None:
        # A pooler may execute each transaction on another backend, which lacks the statement. A
        # pooler states a process id that is not the backend's.
        backend = connection.execute("SELECT pg_backend_pid()").fetchone()
        if backend == (connection.info.backend_pid,):
            connection.prepare_threshold = PREPARED_FROM
        else:
            self._has_pooler = True

    def close(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop()[1].close()


def _has_something_to_read(connection: psycopg.Connection) -> bool:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
