"""Look-ups of objects: where the content of keys is, and whether it is what the bucket has now. Nothing here writes.

Any number of keys is asked for in one round trip, and all answers are of one moment.
Source: "Which objects are to be archived" in docs/design.md.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar

import psycopg
from psycopg.rows import args_row

from caf_pipeline.inventory.objects import is_supported
from caf_pipeline.ledger.copy import GOOD
from caf_pipeline.ledger.database import LedgerPart
from caf_pipeline.ledger.records import Currency, LocatedRange, Location, LocationRow
from caf_pipeline.store.protocol import Posting

_OF_SOURCE: Final = "source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND file_path = ANY(%(keys)b)"
_FOUND: Final = f"""
    SELECT file_path AS key, object_version, version_id, start_byte, end_byte, etag,
        last_modified, file_locations.sha256, caf_files.name AS chunk, merkle_root,
        owner, start, stored_size_bytes, snapshot, NULL::jsonb AS parts
    FROM file_locations JOIN caf_files USING (caf_file_id) JOIN plans USING (plan_id)
    WHERE file_locations.{_OF_SOURCE} AND part = 0 AND state = ANY(%(good)s)
"""
# Takes as long to plan as all the rest to answer: asked only for keys that may have such objects.
_FOUND_IN_PARTS: Final = f"""{_FOUND}
    UNION ALL
    SELECT file_path, object_version, version_id, 0, size_bytes, etag, last_modified, ''::bytea, caf_files.name, merkle_root,
        owner, start, stored_size_bytes, snapshot, parts
    FROM objects_in_parts AS whole JOIN caf_files USING (caf_file_id) JOIN plans ON plans.plan_id = whole.plan_id
    WHERE whole.{_OF_SOURCE}
"""
_MAY_BE_IN_PARTS: Final = f"SELECT DISTINCT file_path AS key FROM object_parts WHERE {_OF_SOURCE}"
_SAID: Final = f"""
    SELECT DISTINCT ON (file_path) file_path AS key, stated_at, object_version, inventory
    FROM current_exceptions WHERE {_OF_SOURCE} ORDER BY file_path, stated_at DESC
"""
_PENDING: Final = f"""
    SELECT file_path AS key, object_version, last_modified, name AS chunk, state
    FROM claims JOIN caf_files USING (caf_file_id) WHERE claims.{_OF_SOURCE}
    UNION ALL
    SELECT file_path, object_version, last_modified, NULL, reason FROM skipped_objects WHERE {_OF_SOURCE}
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


class _Found(NamedTuple):
    """A location, and the chunk that it is in; `snapshot` is that by which it was planned."""

    key: str
    object_version: str
    version_id: str | None
    start_byte: int
    end_byte: int
    etag: str
    last_modified: datetime
    sha256: bytes
    chunk: str
    merkle_root: bytes
    owner: str
    start: int
    stored_size_bytes: int
    snapshot: str
    parts: Sequence[Mapping[str, Any]] | None


class _Said(NamedTuple):
    """What the latest exception of a key says to be current from then on: an identity, or None where the key is gone."""

    key: str
    stated_at: datetime
    object_version: str | None
    inventory: str


class _Pending(NamedTuple):
    """An identity of a key that a chunk claims, or that is skipped; the chunk is None then, and the state is the reason."""

    key: str
    object_version: str
    last_modified: datetime | None
    chunk: str | None
    state: str


class _InParts(NamedTuple):
    """A key of which some object was to be archived in parts."""

    key: str


_Row = TypeVar("_Row", _Found, _Said, _Pending, _InParts)


class ObjectLookups(LedgerPart):
    """Where objects are."""

    def locate(self, source: str, key: str, object_version: str | None = None) -> Location | None:
        """Return the current location of a key, as `locate_many`, or that of one version, whose currency is not asked for."""
        if object_version is None:
            return self.locate_many(source, [key], last_seen=True).get(key)
        with self._database.reading() as connection:
            versions = _ask(connection, _FOUND, _Found, source, [key]).fetchall()
            if all(one.object_version != object_version for one in versions):
                versions = _ask(connection, _FOUND_IN_PARTS, _Found, source, [key]).fetchall()
        return next((_location(one) for one in versions if one.object_version == object_version), None)

    def locate_many(self, source: str, keys: Iterable[str], *, last_seen: bool = False) -> Mapping[str, Location]:
        """Return the current location of each key that has one. All keys and answers are in memory at once.

        Current is what the latest exception names, or the greatest last_modified where that is later. Where the current content
        is not located, or the key is gone, it is the located content of greatest last_modified, and its `currency` says so.
        Only chunks in good standing count. When a key that is gone was `last_seen` takes one more round trip for each.
        """
        supported = [key for key in keys if is_supported(key.encode("utf-8", "surrogatepass"))]
        with self._database.reading() as connection:
            found, said, pending, in_parts = _ask_all(connection, _FOUND, source, supported)
            if in_parts:
                found, said, pending, _ = _ask_all(connection, _FOUND_IN_PARTS, source, supported)
            located = {}
            for key, versions in found.items():
                one, in_force = _choose(versions, said.get(key, ()))
                known = _currency(one, in_force, pending.get(key, ()))
                if last_seen and in_force and known.gone_at:
                    known = replace(known, last_seen=_last_seen(connection, source, one, in_force))
                located[key] = _location(one, known)
        return located


_Known = tuple[dict[str, list[_Found]], dict[str, list[_Said]], dict[str, list[_Pending]], dict[str, list[_InParts]]]


def _ask_all(connection: psycopg.Connection[Any], locations: str, source: str, keys: Sequence[str]) -> _Known:
    """Return what is known of keys at one moment, by key, in one round trip."""
    with connection.pipeline():
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        found = _ask(connection, locations, _Found, source, keys)
        said = _ask(connection, _SAID, _Said, source, keys)
        pending = _ask(connection, _PENDING, _Pending, source, keys)
        in_parts = _ask(connection, _MAY_BE_IN_PARTS, _InParts, source, keys)
        connection.execute("COMMIT")
    return _by_key(found.fetchall()), _by_key(said.fetchall()), _by_key(pending.fetchall()), _by_key(in_parts.fetchall())


def _ask(
    connection: psycopg.Connection[Any], statement: str, make: Callable[..., _Row], source: str, keys: Sequence[str]
) -> psycopg.Cursor[_Row]:
    cursor = connection.cursor(binary=True, row_factory=args_row(make))
    return cursor.execute(statement, {"source": source, "keys": keys, "good": GOOD})


def _location(one: _Found, currency: Currency | None = None) -> Location:
    row = LocationRow(*one[:6], one.last_modified.astimezone(UTC), one.sha256)
    posting = Posting(one.merkle_root, one.owner, one.start, one.stored_size_bytes)
    return Location(row, one.chunk, posting, currency, [_part(part) for part in one.parts or ()])


def _part(said: Mapping[str, Any]) -> LocatedRange:
    posting = Posting(bytes.fromhex(said["merkle_root"]), said["owner"], said["start"], said["stored_size_bytes"])
    return LocatedRange(said["start_byte"], said["end_byte"], bytes.fromhex(said["sha256"]), said["chunk"], posting)


def _by_key(rows: Iterable[_Row]) -> dict[str, list[_Row]]:
    found: defaultdict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        found[row.key].append(row)
    return found


# S3 tells times to the second: of two versions of one second that is current which was listed later (a snapshot's name ends with
# its time), whichever was planned or loaded first; a rebuilt ledger says the same.
def _choose(versions: Sequence[_Found], said: Sequence[_Said]) -> tuple[_Found, _Said | None]:
    """Return which of a key's locations is given out, and the exception that is in force."""
    latest = max(one.last_modified for one in versions)
    in_force = next((one for one in said if one.stated_at >= latest), None)
    named = in_force and in_force.object_version
    if len(versions) == 1:
        return versions[0], in_force

    def order(one: _Found) -> tuple[Any, ...]:
        return one.object_version == named, one.last_modified, one.snapshot, one.object_version

    return max(versions, key=order), in_force


def _currency(given_out: _Found, in_force: _Said | None, pending: Sequence[_Pending]) -> Currency:
    """Return what is known of the current content of a key, beside the location that is given out for it."""
    since = (in_force.stated_at if in_force else given_out.last_modified).astimezone(UTC)
    for other in pending:
        if other.object_version == given_out.object_version:
            continue
        is_newer = other.chunk is not None if other.last_modified is None else other.last_modified > since
        if is_newer or (in_force and other.object_version == in_force.object_version):
            return Currency(is_current=False, chunk=other.chunk, state=other.state)
    if in_force is None or in_force.object_version == given_out.object_version:
        return Currency(is_current=True)
    return Currency(is_current=False, gone_at=since if in_force.object_version is None else None)


def _last_seen(connection: psycopg.Connection[Any], source: str, given_out: _Found, gone: _Said) -> datetime | None:
    """Return when the key was last listed: by an inventory before the one that missed it, or the one that it was planned by."""
    values = {"source": source, "inventory": gone.inventory, "key": given_out.key.encode()}
    planned_by = connection.execute(_PLANNED_BY, {"source": source, "name": given_out.snapshot}).fetchone()
    times = [*(connection.execute(_LAST_SEEN, values).fetchone() or ()), *(planned_by or [_time_of(given_out.snapshot)])]
    return max((one.astimezone(UTC) for one in times if one), default=None)


_SNAPSHOT_TIME: Final = re.compile(r".*-(\d{8}T\d{12}Z)")


def _time_of(snapshot: str) -> datetime | None:
    """Return the time that a snapshot's name ends with: when it was made."""
    match = _SNAPSHOT_TIME.fullmatch(snapshot)
    return datetime.strptime(match[1], "%Y%m%dT%H%M%S%fZ").replace(tzinfo=UTC) if match else None
