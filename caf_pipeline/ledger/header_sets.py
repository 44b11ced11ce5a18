"""The distinct sets of headers and user metadata that archived objects have."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection

from caf_pipeline.inventory.headers import HEADERS
from caf_pipeline.ledger.copy import copy_batches

if TYPE_CHECKING:
    import pyarrow as pa

    from caf_pipeline.inventory.manifest import PartLocation

Batches = Callable[[], "Iterable[pa.RecordBatch]"]
"""Returns the batches from the first on each time that it is called."""

_CREATE: Final = (
    f"CREATE TEMPORARY TABLE naming (header_set bytea, {' text, '.join(HEADERS)} text, user_metadata text) ON COMMIT DROP"
)
# In one order, by all who insert: two transactions that insert the same sets in other orders would wait for each other.
_INSERT: Final = """
    INSERT INTO header_sets
    SELECT DISTINCT ON (header_set) header_set, content_type, content_encoding, content_language, content_disposition,
        cache_control, expires, user_metadata::jsonb
    FROM naming ORDER BY header_set ON CONFLICT DO NOTHING
    """


def record_header_sets(connection: Connection, batches: "Iterable[pa.RecordBatch]", part: "PartLocation | None" = None) -> None:
    """Write the sets of a chunk's objects, batches of LOCATION_SCHEMA, and of its part; sets may be known, or come again."""
    from caf_pipeline.ledger.arrow import HEADER_SET, batch_of_headers, header_set_batches  # noqa: PLC0415 - needs no pyarrow

    of_part = [batch_of_headers(part.headers)] if part is not None else []
    connection.exec_driver_sql(_CREATE)
    if copy_batches(connection, "naming", {}, HEADER_SET, header_set_batches(chain(of_part, batches))):
        connection.exec_driver_sql(_INSERT)
