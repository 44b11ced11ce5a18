"""Writes docs/reference/schema.md from a new ledger's tables.

Run `python docs/schema_page.py docs/reference/schema.md`.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.rows import namedtuple_row

from caf_pipeline.ledger.database import database_of
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.ledger.sql_files import make_tables
from caf_pipeline.settings import Settings

_OPENING: Final = """\
# The ledger's tables

`make docs` writes this page from a database that the files of `sql/` made, and a test keeps it
current. [Design](../explanation/design.md) explains the terms.

Unless a comment says otherwise, times come from the database's clock and sizes are in bytes.
`text C` has the collation "C": it is compared as bytes. The ledger has one more table,
`schema_files`. It has the name and the SHA-256 of each file of `sql/` that created the ledger.

A solid line is a foreign key. A dotted line is a reference without a foreign key.
"""

_COLUMNS: Final = """
    SELECT relname AS table, obj_description(pg_class.oid) AS about, attname AS name,
        replace(format_type(atttypid, atttypmod), 'timestamp with time zone', 'timestamptz')
            || CASE WHEN attcollation = '"C"'::regcollation THEN ' C' ELSE '' END AS type,
        NOT attnotnull AS nullable,
        CASE WHEN attidentity <> '' THEN 'identity'
            ELSE '`' || split_part(pg_get_expr(adbin, adrelid), '::', 1) || '`' END AS default,
        split_part(col_description(pg_class.oid, attnum), ' -> ', 1) AS comment,
        split_part(col_description(pg_class.oid, attnum), ' -> ', 2) AS refers_to
    FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid AND attnum > 0
    LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
    WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND relname <> 'schema_files'
    ORDER BY pg_class.oid, attnum
"""
_KEYS: Final = """
    SELECT conrelid::regclass::text AS table, contype AS kind, confrelid::regclass::text AS target,
        ARRAY(SELECT attname::text FROM unnest(conkey) WITH ORDINALITY AS key (attnum, place)
            JOIN pg_attribute USING (attnum) WHERE attrelid = conrelid ORDER BY place) AS columns,
        replace(pg_get_constraintdef(oid, true), '::text', '') AS definition
    FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND contype IN ('p', 'u', 'f', 'c')
    UNION ALL
    SELECT tablename, 'i', '', '{}',
        replace(pg_get_indexdef(indexname::regclass, 0, true), '::text', '')
    FROM pg_indexes WHERE schemaname = 'public'
        AND NOT EXISTS (SELECT FROM pg_constraint WHERE conname = indexname)
    ORDER BY 5
"""


def page(connection: psycopg.Connection[Any]) -> str:
    """Return the text of docs/reference/schema.md."""
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        columns = cursor.execute(_COLUMNS).fetchall()
        keys = cursor.execute(_KEYS).fetchall()
    drawing, sections = [], []
    for table, rows in groupby(columns, attrgetter("table")):
        of_table = list(rows)
        own_keys = [key for key in keys if key.table == table]
        drawing += list(_references(of_table, own_keys)) or [f"    {table}"]
        sections += _section(of_table, own_keys)
    return "\n".join([_OPENING, "```mermaid", "erDiagram", *drawing, "```", *sections]) + "\n"


def _references(columns: Sequence[Any], keys: Sequence[Any]) -> Iterator[str]:
    """Yield a line of the drawing for each reference from this table to another table."""
    foreign = [("--", key.target, key.columns) for key in keys if key.kind == "f"]
    logical = [
        ("..", column.refers_to.partition(".")[0], [column.name])
        for column in columns
        if column.refers_to
    ]
    nullable = {column.name for column in columns if column.nullable}
    primary = next((key.columns for key in keys if key.kind == "p"), [])
    for stroke, target, names in foreign + logical:
        at_target = "||" if nullable.isdisjoint(names) else "|o"
        at_table = "o|" if names == primary else "o{"
        line = f"{target} {at_target}{stroke}{at_table} {columns[0].table}"
        yield f'    {line} : "{", ".join(names)}"'


def _section(columns: Sequence[Any], keys: Sequence[Any]) -> Iterator[str]:
    """Yield the lines of the section about a table."""
    yield from ("", f"## {columns[0].table}", "", columns[0].about, "")
    yield "| column | type | null | default | comment |"
    yield "|---|---|---|---|---|"
    for column in columns:
        comment = column.comment.replace("<", "\\<").replace("|", "\\|")
        comment += f" (→ `{column.refers_to}`)" if column.refers_to else ""
        null = "yes" if column.nullable else ""
        yield f"| `{column.name}` | {column.type} | {null} | {column.default or ''} | {comment} |"
    if keys:
        yield ""
    for kind in "pufci":
        yield from (f"- `{key.definition}`" for key in keys if key.kind == kind)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        database = database_of(Settings(home=Path(home)))
        with (
            closing(embedded_server(Path(home) / "postgres")),
            closing(database.connect()) as connection,
        ):
            make_tables(connection)
            text = page(connection)
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
