"""Distinct sets of headers and user metadata of archived objects."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Final

import pyarrow as pa
from sqlalchemy import Connection

from caf_pipeline.inventory.manifest import PartLocation
from caf_pipeline.ledger.arrow import HEADER_SET, batch_of_headers, header_set_batches
from caf_pipeline.ledger.copy import copy_batches
from caf_pipeline.ledger.query_files import query

Batches = Callable[[], Iterable[pa.RecordBatch]]
"""Returns an iterator over all batches, from the first, at each call."""

_CREATE: Final = """
    CREATE TEMPORARY TABLE naming (
        header_set bytea, content_type text, content_encoding text, content_language text,
        content_disposition text, cache_control text, expires text, user_metadata text
    ) ON COMMIT DROP
    """


def record_header_sets(
    connection: Connection, batches: Iterable[pa.RecordBatch], part: PartLocation | None = None
) -> None:
    """Insert the header sets of a chunk's objects and of its part. Existing sets stay.

    `batches` have the columns of LOCATION_SCHEMA.
    """
    of_part = [batch_of_headers(part.headers)] if part is not None else []
    connection.exec_driver_sql(_CREATE)
    if copy_batches(
        connection, "naming", {}, HEADER_SET, header_set_batches(chain(of_part, batches))
    ):
        connection.exec_driver_sql(query("insert_header_sets"))
