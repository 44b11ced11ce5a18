"""Look-ups of objects: where the content of keys is, and whether it is what the bucket has now. Nothing here writes.

Any number of keys is asked for in one round trip, and all answers are of one moment.
Source: "Which objects are to be archived" in docs/design.md.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.rows import args_row

from caf_pipeline.inventory.objects import can_be_stored
from caf_pipeline.ledger.copy import GOOD
from caf_pipeline.ledger.database import LedgerPart
from caf_pipeline.ledger.records import Currency, LocatedRange, Location, LocationRow, require_zone
from caf_pipeline.store.protocol import Posting

_GOOD: Final = f"'{{{','.join(GOOD)}}}'"
_LOOK_UP: Final = f"SELECT * FROM look_up(%(source)s, %(keys)b, {_GOOD})"
_LOOK_UP_ONE: Final = f"SELECT * FROM look_up(%(source)s, ARRAY[%(key)s], {_GOOD})"
# The same, with what inventories up to a time stated in place of what the last one did, and what the next one did. LATERAL with
# LIMIT keeps the planner to one look-up a key.
_LOOK_UP_AS_OF: Final = f"""
    {_LOOK_UP} WHERE told <> 'exception'
    UNION ALL
    SELECT said.told, asked.key, said.object_version, said.stated_at, NULL, NULL, said.inventory, NULL, NULL, NULL, NULL, NULL,
        NULL, NULL, NULL, NULL, NULL, NULL
    FROM unnest(%(keys)b::text[]) AS asked (key)
    CROSS JOIN (SELECT source_id FROM sources WHERE name = %(source)s) AS own
    CROSS JOIN LATERAL (
        (SELECT 'exception' AS told, object_version, stated_at, inventory FROM current_exceptions
            WHERE source_id = own.source_id AND file_path = asked.key AND stated_at <= %(as_of)s ORDER BY stated_at DESC LIMIT 1)
        UNION ALL
        (SELECT 'next', object_version, stated_at, inventory FROM current_exceptions
            WHERE source_id = own.source_id AND file_path = asked.key AND stated_at > %(as_of)s ORDER BY stated_at LIMIT 1)
        ) AS said
"""
_LAST_SEEN: Final = """
    SELECT max(earlier.taken_at)
    FROM inventories AS own JOIN inventories AS earlier ON earlier.source_id = own.source_id
        AND (earlier.taken_at, earlier.name) < (own.taken_at, own.name)
    WHERE own.source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND own.name = %(inventory)s
        AND earlier.after_key < %(key)s AND coalesce(earlier.until_key >= %(key)s, true)
"""

_PLANNED_BY: Final = """
    SELECT taken_at FROM inventories
    WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND name = %(name)s
"""


class _Known(NamedTuple):
    """What is known of a key: the columns of the database's function look_up (sql/), which says what they mean.

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


class ObjectLookups(LedgerPart):
    """Where objects are."""

    def locate(
        self, source: str, key: str, object_version: str | None = None, *, as_of: datetime | None = None
    ) -> Location | None:
        """Return the location of a key as `locate_many`, or that of one version, whose currency is not asked for."""
        if object_version is None:
            return self.locate_many(source, [key], last_seen=True, as_of=as_of).get(key)
        if not can_be_stored(key):
            return None
        with self._database.reading() as connection:
            known = _look_up(connection, source, [key])
        return next((_location(one) for one in known if one.told == "location" and one.object_version == object_version), None)

    def locate_many(
        self, source: str, keys: Iterable[str], *, last_seen: bool = False, as_of: datetime | None = None
    ) -> Mapping[str, Location]:
        """Return the current location of each key that has one. All keys and answers are in memory at once.

        Current is what the latest exception names, or the greatest last_modified where that is later. Where the current content
        is not located, or the key is gone, it is the located content of greatest last_modified, and its `currency` says so.
        Only chunks in good standing count. When a key that is gone was `last_seen` takes one more round trip for each.

        `as_of` an earlier time, what was modified or stated later is left out: see `Currency.as_of` for what is not known then.
        """
        supported = list(filter(can_be_stored, keys))
        told: Mapping[str, defaultdict[str, list[_Known]]] = {
            kind: defaultdict(list) for kind in ("location", "exception", "pending", "next")
        }
        located = {}
        with self._database.reading() as connection:
            for one in _look_up(connection, source, supported, as_of):
                told[one.told][one.key].append(one)
            for key, versions in told["location"].items():
                given_out, in_force = _choose(versions, told["exception"].get(key, ()), told["next"].get(key, ()))
                currency = _currency(given_out, in_force, told["pending"].get(key, ()), as_of)
                if last_seen and in_force and currency.gone_at:
                    currency = replace(currency, last_seen=_last_seen(connection, source, given_out, in_force))
                located[key] = replace(_location(given_out, currency), older_versions=len(versions) - 1)
        return located

    def locate_versions(self, source: str, keys: Iterable[str]) -> Mapping[str, Sequence[Location]]:
        """Return the located versions of each key: first the version that `locate_many` returns, then the others, newest first.

        Keys without a located version are left out. All keys and answers are in memory at a time.
        """
        supported = list(filter(can_be_stored, keys))
        current = self.locate_many(source, supported)
        others = defaultdict(list)
        with self._database.reading() as connection:
            for row in _look_up(connection, source, supported):
                if row.told == "location" and row.key in current:
                    others[row.key].append(row)
        versions = {}
        for key, first in current.items():
            older = [row for row in others[key] if row.object_version != first.row.object_version]
            older.sort(key=lambda row: (row.moment, row.inventory, row.object_version), reverse=True)
            versions[key] = [first, *(_location(row, Currency(is_current=False)) for row in older)]
        return versions


def _look_up(
    connection: psycopg.Connection[Any], source: str, keys: Sequence[str], as_of: datetime | None = None
) -> Sequence[_Known]:
    """Return what is known of keys at one moment; with `as_of`, of what was modified or stated up to that time.

    Then what was stated first after it comes, too ('next').
    """
    require_zone(as_of)
    if not can_be_stored(source):
        return []
    cursor = connection.cursor(binary=True, row_factory=args_row(_Known))
    if as_of is None:
        if len(keys) == 1:
            return cursor.execute(_LOOK_UP_ONE, {"source": source, "key": keys[0]}).fetchall()
        return cursor.execute(_LOOK_UP, {"source": source, "keys": keys}).fetchall()
    known = cursor.execute(_LOOK_UP_AS_OF, {"source": source, "keys": keys, "as_of": as_of}).fetchall()
    # Of a claim or skip the LastModified may be unknown (None).
    return [one for one in known if one.told == "next" or (one.moment is not None and one.moment <= as_of)]


_posting: Final = lru_cache(64)(Posting)  # objects that are asked for together are in few chunks


def _location(one: _Known, currency: Currency | None = None) -> Location:
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
    posting = Posting(bytes.fromhex(said["merkle_root"]), said["owner"], said["start"], said["stored_size_bytes"])
    return LocatedRange(said["start_byte"], said["end_byte"], bytes.fromhex(said["sha256"]), said["chunk"], posting)


# S3 tells times to the second: of two versions of one second that is current which was listed later (a snapshot's name ends with
# its time), whichever was planned or loaded first; a rebuilt ledger says the same. As of a time before an inventory said which of
# them is current, it is that one.
def _choose(
    versions: Sequence[_Known], exceptions: Sequence[_Known], stated_next: Sequence[_Known]
) -> tuple[_Known, _Known | None]:
    """Return which of a key's locations is given out, and the exception that is in force."""
    if len(versions) == 1 and not exceptions:  # as nearly all keys have it
        return versions[0], None
    latest = max(one.moment for one in versions)
    in_force = next((one for one in exceptions if one.moment >= latest), None)
    named = in_force and in_force.object_version
    if len(versions) == 1:
        return versions[0], in_force

    then = next((one.object_version for one in stated_next), None)

    def order(one: _Known) -> tuple[Any, ...]:
        return one.object_version == named, one.moment, one.object_version == then, one.inventory, one.object_version

    return max(versions, key=order), in_force


_CURRENT: Final = Currency(is_current=True)


def _currency(given_out: _Known, in_force: _Known | None, pending: Sequence[_Known], as_of: datetime | None) -> Currency:
    """Return what is known of the current content of a key, beside the location that is given out for it."""
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
    return Currency(is_current=False, gone_at=since if in_force.object_version is None else None, as_of=as_of)


def _last_seen(connection: psycopg.Connection[Any], source: str, given_out: _Known, gone: _Known) -> datetime | None:
    """Return when the key was last listed: by an inventory before the one that missed it, or the one that it was planned by."""
    values = {"source": source, "inventory": gone.inventory, "key": given_out.key.encode()}
    planned_by = connection.execute(_PLANNED_BY, {"source": source, "name": given_out.inventory}).fetchone()
    times = [*(connection.execute(_LAST_SEEN, values).fetchone() or ()), *(planned_by or [_time_of(given_out.inventory)])]
    return max((one.astimezone(UTC) for one in times if one), default=None)


_SNAPSHOT_TIME: Final = re.compile(r".*-(\d{8}T\d{12}Z)")


def _time_of(snapshot: str) -> datetime | None:
    """Return the time that a snapshot's name ends with: when it was made."""
    match = _SNAPSHOT_TIME.fullmatch(snapshot)
    return datetime.strptime(match[1], "%Y%m%dT%H%M%S%fZ").replace(tzinfo=UTC) if match else None
