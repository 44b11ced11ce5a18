"""Questions of those who read archived objects: where the content of keys is, and whether it is
what the bucket has now.

psycopg alone answers them, with the right to SELECT and nothing else. Any number of keys is asked
for in one round trip, and all answers are of one moment. Source: "Which objects are to be archived"
in docs/explanation/design.md; decision 30 for what SQLAlchemy would cost here.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from caf_pipeline.inventory.objects import can_be_stored, is_supported
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.read_connections import ReadConnections
from caf_pipeline.ledger.records import Currency, LocatedRange, Location, NotArchived, require_zone
from caf_pipeline.store.protocol import PostRecord, ProviderRecord
from caf_pipeline.waits import Waits

_LOOK_UP: Final = "SELECT * FROM look_up(%(source)s, %(keys)s, %(good)s)"

KeyRange = tuple[str, str | None]
"""Keys from the first text on and below the second (None: without an end), by their bytes; text
that the database holds.
"""


class LookupRow(NamedTuple):
    """What is known of a key: the columns of the database's function look_up (sql/), which says
    what they mean.

    The types are those of a location.
    """

    told: str
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


class Lookup:
    """What the ledger tells those who read. Nothing here writes. Safe in threads.

    Raises everywhere: LedgerUnreachable, LedgerError.
    """

    def __init__(self, database: Database) -> None:
        """Connect to nothing yet."""
        self._connections = ReadConnections(database)

    def bring_up(self, waits: Waits) -> None:
        """Make the tables that the database lacks: see `Database.bring_up`."""
        with self._connections.connection() as connection:
            self._connections.database.bring_up(connection, waits)

    def close(self) -> None:
        """Close the idle connections; a later question opens new ones."""
        self._connections.close()

    def sources(self) -> Sequence[str]:
        """Return the names of all sources ever registered."""
        return self._column("SELECT name FROM sources ORDER BY name", {})

    def _column(self, statement: str, values: Mapping[str, Any]) -> list[Any]:
        """Return the first column of a statement's rows."""
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
        """Return the location of a key as `locate_many`, or that of one version, whose currency is
        not asked for.
        """
        if object_version is None:
            return self.locate_many(source, [key], last_seen=True, as_of=as_of).get(key)
        if not can_be_stored(key):
            return None
        with self._connections.connection() as connection:
            known = _look_up(connection, source, [key])
        return next(
            (
                _location(one)
                for one in known
                if one.told == "location" and one.object_version == object_version
            ),
            None,
        )

    def locate_many(
        self,
        source: str,
        keys: Iterable[str],
        *,
        last_seen: bool = False,
        as_of: datetime | None = None,
    ) -> Mapping[str, Location]:
        """Return the current location of each key that has one.

        All keys and answers are in memory at once.

        Current is what the latest exception names, or the greatest last_modified where that is
        later. Where the current content is not located, or the key is gone, it is the located
        content of greatest last_modified, and its `currency` says so. Only chunks in good standing
        count. When a key that is gone was `last_seen` takes one more round trip for each.

        `as_of` an earlier time, what was modified or stated later is left out: see `Currency.as_of`
        for what is not known then.
        """
        supported = list(filter(can_be_stored, keys))
        told: Mapping[str, defaultdict[str, list[LookupRow]]] = {
            kind: defaultdict(list) for kind in ("location", "exception", "pending", "next")
        }
        located = {}
        with self._connections.connection() as connection:
            for one in _look_up(connection, source, supported, as_of):
                told[one.told][one.key].append(one)
            for key, versions in told["location"].items():
                given_out, in_force = _choose(
                    versions, told["exception"].get(key, ()), told["next"].get(key, ())
                )
                currency = _currency(given_out, in_force, told["pending"].get(key, ()), as_of)
                if last_seen and in_force and currency.gone_at:
                    currency = replace(
                        currency, last_seen=_last_seen(connection, source, given_out, in_force)
                    )
                located[key] = replace(
                    _location(given_out, currency), older_versions=len(versions) - 1
                )
        return located

    def locate_versions(self, source: str, keys: Iterable[str]) -> Mapping[str, Sequence[Location]]:
        """Return the located versions of each key: first the version that `locate_many` returns,
        then the others, newest first.

        Keys without a located version are left out. All keys and answers are in memory at a time.
        """
        supported = list(filter(can_be_stored, keys))
        current = self.locate_many(source, supported)
        others = defaultdict(list)
        with self._connections.connection() as connection:
            for row in _look_up(connection, source, supported):
                if row.told == "location" and row.key in current:
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
        """Return the located versions of a key, the latest first and at most `limit`, and how many
        there are.
        """
        if not can_be_stored(source) or not can_be_stored(key):
            return [], 0
        values = {"source": source, "key": key, "good": GOOD, "limit": limit}
        with self._connections.connection() as connection:
            rows = connection.execute(query("located_versions"), values).fetchall()
        return [_in_utc(LocationRow(*columns)) for *columns, _ in rows], rows[0][-1] if rows else 0

    def archived_keys(self, source: str, start: str, end: str | None, limit: int) -> Sequence[str]:
        """Return the first keys in `[start, end)`, by their bytes and at most `limit`; `end` None:
        no end.

        Both are text that the database holds: no NUL, no surrogate. Keys without a location in good
        standing may be among them.
        """
        if not can_be_stored(source):
            return []
        return self._column(
            query("archived_keys"), {"source": source, "start": start, "end": end, "limit": limit}
        )

    def count_not_archived(
        self, source: str, plain: KeyRange, encoded: KeyRange
    ) -> tuple[int, int]:
        """Return how many objects are still to be archived, and how many were skipped.

        Counted are keys in the range `plain`, and unsupported ones in the range `encoded` of what
        they are recorded as.
        """
        if not can_be_stored(source):
            return 0, 0
        values = {
            "source": source,
            "start": plain[0],
            "end": plain[1],
            "encoded_start": encoded[0],
            "encoded_end": encoded[1],
        }
        with self._connections.connection() as connection:
            pending, skipped = connection.execute(
                query("count_not_archived"), values
            ).fetchone() or (0, 0)
        return pending, skipped

    def not_archived(self, source: str, key: str) -> Sequence[NotArchived]:
        """Return what is known of the identities of a key that are not located: claimed, skipped,
        or of a chunk that is lost.

        Those that were modified last come first. The key may hold bytes that are not UTF-8, as
        names of the operating system do (`os.fsdecode`).
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
            return (
                connection.cursor(row_factory=args_row(NotArchived))
                .execute(query("not_archived"), values)
                .fetchall()
            )

    def header_sets(self, names: Collection[bytes]) -> Mapping[bytes, ObjectHeaders]:
        """Return the header sets of these names."""
        with self._connections.connection() as connection:
            cursor = connection.cursor(binary=True)
            rows = cursor.execute(query("header_sets"), {"names": list(names)}).fetchall()
        return {name: ObjectHeaders(*values) for name, *values in rows}

    def chunks_with_log_times(self, chunks: Collection[str]) -> Collection[str]:
        """Return those of these chunks whose packing looked for logs."""
        statement = "SELECT name FROM caf_files WHERE name = ANY(%(chunks)s) AND has_log_times"
        return set(self._column(statement, {"chunks": list(chunks)}))

    def log_times(
        self, locations: Sequence[Location]
    ) -> Mapping[int, tuple[int | None, int | None]]:
        """Return, by their number in `locations`, of those that are logs the first and the last
        time (None: not told).
        """
        values = {
            "chunks": [one.chunk for one in locations],
            "starts": [one.row.start_byte for one in locations],
        }
        with self._connections.connection() as connection:
            rows = connection.execute(query("log_times"), values).fetchall()
        # An empty object begins where the next one does.
        return {
            number - 1: (first_ms, last_ms)
            for number, first_ms, last_ms in rows
            if locations[number - 1].size_bytes
        }

    def provider_records(self) -> Mapping[str, ProviderRecord]:
        """Return what was measured of providers, by provider."""
        statement = (
            "SELECT provider, upload_rate, download_rate, failures, failed_at FROM "
            "providers ORDER BY provider"
        )
        with self._connections.connection() as connection:
            records = (
                connection.cursor(row_factory=args_row(ProviderRecord))
                .execute(statement)
                .fetchall()
            )
        return {record.provider: record for record in records}

    def seen_height(self, chain_id: str) -> int:
        """Return the greatest block height ever recorded of a chain; 0 if there is none."""
        heights = self._column(
            "SELECT height FROM chain_heights WHERE chain_id = %(chain_id)s", {"chain_id": chain_id}
        )
        return max(heights, default=0)

    def folder_store(self) -> str | None:
        """Return the id of the folder that has the chunks; None while no folder was marked."""
        return next(iter(self._column("SELECT id FROM folder_store", {})), None)


def _in_utc(row: LocationRow) -> LocationRow:
    return replace(row, last_modified=row.last_modified.astimezone(UTC))


def _look_up(
    connection: psycopg.Connection, source: str, keys: Sequence[str], as_of: datetime | None = None
) -> Sequence[LookupRow]:
    """Return what is known of keys at one moment; with `as_of`, of what was modified or stated up
    to that time.

    Then what was stated first after it comes, too ('next').
    """
    require_zone(as_of)
    if not can_be_stored(source):
        return []
    cursor = connection.cursor(binary=True, row_factory=args_row(LookupRow))
    if as_of is None:
        return cursor.execute(_LOOK_UP, {"source": source, "keys": keys, "good": GOOD}).fetchall()
    known = cursor.execute(
        query("look_up_as_of"), {"source": source, "keys": keys, "as_of": as_of, "good": GOOD}
    ).fetchall()
    # Of a claim or skip the LastModified may be unknown (None).
    return [
        one
        for one in known
        if one.told == "next" or (one.moment is not None and one.moment <= as_of)
    ]


_posting: Final = lru_cache(64)(PostRecord)  # objects that are asked for together are in few chunks


def _location(one: LookupRow, currency: Currency | None = None) -> Location:
    last_modified = one.moment.astimezone(UTC)
    row = LocationRow(
        one.key,
        one.object_version,
        one.version_id,
        one.start_byte,
        one.end_byte,
        one.etag,
        last_modified,
        one.sha256,
        one.header_set,
    )
    posting = _posting(one.merkle_root, one.owner, one.start, one.stored_size_bytes)
    return Location(row, one.chunk, posting, currency, [_part(part) for part in one.parts or ()])


def _part(said: Mapping[str, Any]) -> LocatedRange:
    posting = PostRecord(
        bytes.fromhex(said["merkle_root"]), said["owner"], said["start"], said["stored_size_bytes"]
    )
    return LocatedRange(
        said["start_byte"], said["end_byte"], bytes.fromhex(said["sha256"]), said["chunk"], posting
    )


# S3 tells times to the second: of two versions of one second that is current which was listed later
# (a snapshot's name ends with its time), whichever was planned or loaded first; a rebuilt ledger
# says the same. As of a time before an inventory said which of them is current, it is that one.
def _choose(
    versions: Sequence[LookupRow], exceptions: Sequence[LookupRow], stated_next: Sequence[LookupRow]
) -> tuple[LookupRow, LookupRow | None]:
    """Return which of a key's locations is given out, and the exception that is in force."""
    if len(versions) == 1 and not exceptions:  # as nearly all keys have it
        return versions[0], None
    latest = max(one.moment for one in versions)
    in_force = next((one for one in exceptions if one.moment >= latest), None)
    named = in_force and in_force.object_version
    if len(versions) == 1:
        return versions[0], in_force

    then = next((one.object_version for one in stated_next), None)

    def order(one: LookupRow) -> tuple[Any, ...]:
        return (
            one.object_version == named,
            one.moment,
            one.object_version == then,
            one.inventory,
            one.object_version,
        )

    return max(versions, key=order), in_force


_CURRENT: Final = Currency(is_current=True)


def _currency(
    given_out: LookupRow,
    in_force: LookupRow | None,
    pending: Sequence[LookupRow],
    as_of: datetime | None,
) -> Currency:
    """Return what is known of the current content of a key, beside the location that is given out
    for it.
    """
    if not in_force and not pending:
        return Currency(is_current=True, as_of=as_of) if as_of else _CURRENT
    since = (in_force or given_out).moment.astimezone(UTC)
    for other in pending:
        if other.object_version == given_out.object_version:
            continue
        is_newer = other.chunk is not None if other.moment is None else other.moment > since
        if is_newer or (in_force and other.object_version == in_force.object_version):
            return Currency(is_current=False, chunk=other.chunk, state=other.state, as_of=as_of)
    if in_force is None or in_force.object_version == given_out.object_version:
        return Currency(is_current=True, as_of=as_of)
    return Currency(
        is_current=False, gone_at=since if in_force.object_version is None else None, as_of=as_of
    )


def _last_seen(
    connection: psycopg.Connection, source: str, given_out: LookupRow, gone: LookupRow
) -> datetime | None:
    """Return when the key was last listed: by an inventory before the one that missed it, or the
    one that it was planned by.
    """
    values = {"source": source, "inventory": gone.inventory, "key": given_out.key.encode()}
    planned_by = connection.execute(
        query("inventory_time"), {"source": source, "name": given_out.inventory}
    ).fetchone()
    times = [
        *(connection.execute(query("last_seen"), values).fetchone() or ()),
        *(planned_by or [_time_of(given_out.inventory)]),
    ]
    return max((one.astimezone(UTC) for one in times if one), default=None)


_SNAPSHOT_TIME: Final = re.compile(r".*-(\d{8}T\d{12}Z)")


def _time_of(snapshot: str) -> datetime | None:
    """Return the time that a snapshot's name ends with: when it was made."""
    match = _SNAPSHOT_TIME.fullmatch(snapshot)
    return datetime.strptime(match[1], "%Y%m%dT%H%M%S%fZ").replace(tzinfo=UTC) if match else None
