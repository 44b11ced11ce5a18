"""The distinct sets of headers and user metadata that archived objects have."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from caf_pipeline.inventory.headers import HEADERS, ObjectHeaders
from caf_pipeline.ledger.copy import copy_rows
from caf_pipeline.ledger.database import Connection

if TYPE_CHECKING:
    import pyarrow as pa

    from caf_pipeline.inventory.manifest import PartLocation

Batches = Callable[[], "Iterable[pa.RecordBatch]"]
"""Returns the batches from the first on each time that it is called."""

_COLUMNS: Final = {"header_set": "bytea", **dict.fromkeys(HEADERS, "text"), "user_metadata": "text"}
_REMEMBERED: Final = 10_000
"""Sets of a chunk that are not sent again. Some chunks have as many sets as objects, which may not all stand in memory."""

# In one order, by all who insert: two transactions that insert the same sets in other orders would wait for each other.
_INSERT: Final = """
    INSERT INTO header_sets
    SELECT DISTINCT ON (header_set) header_set, content_type, content_encoding, content_language, content_disposition,
        cache_control, expires, user_metadata::jsonb
    FROM naming ORDER BY header_set ON CONFLICT DO NOTHING
    """


def record_header_sets(connection: Connection, batches: "Iterable[pa.RecordBatch]", part: "PartLocation | None" = None) -> None:
    """Write the sets of a chunk's objects, batches of LOCATION_SCHEMA, and of its part; sets may be known, or come again."""
    from caf_pipeline.ledger.arrow import header_sets  # noqa: PLC0415 - a look-up needs no pyarrow

    sets = chain.from_iterable(header_sets(batch)[1].items() for batch in batches)
    own = [(part.headers.id, part.headers)] if part is not None else []
    columns = ", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
    connection.execute(f"CREATE TEMPORARY TABLE naming ({columns}) ON COMMIT DROP")
    if copy_rows(connection, "naming", _COLUMNS, _rows(chain(own, sets))):
        connection.execute(_INSERT)


def _rows(sets: Iterable[tuple[bytes, ObjectHeaders]]) -> Iterator[tuple[Any, ...]]:
    sent = set[bytes]()
    for name, headers in sets:
        if name in sent:
            continue
        if len(sent) >= _REMEMBERED:
            sent.clear()
        sent.add(name)
        yield name, *(getattr(headers, column) for column in HEADERS), json.dumps(dict(headers.user_metadata))


def read_header_sets(connection: Connection, names: Collection[bytes]) -> Mapping[bytes, ObjectHeaders]:
    """Return the sets of these names."""
    statement = f"SELECT header_set, {', '.join(HEADERS)}, user_metadata FROM header_sets WHERE header_set = ANY(%(names)s)"
    rows = connection.execute(statement, {"names": list(names)}, binary=True)
    return {bytes(name): ObjectHeaders(*values) for name, *values in rows}
