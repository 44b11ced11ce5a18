"""`ledger/tables.py` agrees with the tables of `sql/`, and docs/reference/schema.md with both."""

import runpy
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import namedtuple_row
from sqlalchemy.dialects import postgresql

from caf_pipeline.ledger.sql_files import APPLIED
from caf_pipeline.ledger.tables import METADATA

DOCS = Path(__file__).parents[2] / "docs"

MADE = f"""
    WITH tables AS (SELECT oid, relname FROM pg_class
        WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'
            AND relname <> '{APPLIED}')
    SELECT concat(relname, '.', attname, ' ', format_type(atttypid, atttypmod),
        ' COLLATE ' || quote_ident(collname))
    FROM pg_attribute JOIN tables ON attrelid = tables.oid AND attnum > 0 AND NOT attisdropped
    LEFT JOIN pg_collation ON pg_collation.oid = attcollation AND collname <> 'default'
    UNION ALL
    SELECT concat(relname, ': ', string_agg(attname, ', ' ORDER BY attnum))
    FROM pg_attribute JOIN tables ON attrelid = tables.oid AND attnum > 0 AND NOT attisdropped
    GROUP BY relname
    UNION ALL
    SELECT concat(relname, ' ', replace(pg_get_constraintdef(pg_constraint.oid), '"', ''))
    FROM pg_constraint JOIN tables ON conrelid = tables.oid WHERE contype IN ('p', 'f')
"""
"""A line for each column, table, primary key and foreign key."""

COMMENTS = f"""
    SELECT relname || '.' || attname AS name, NOT attnotnull AS nullable,
        obj_description(pg_class.oid) AS about, col_description(pg_class.oid, attnum) AS comment
    FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped
    WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r' AND relname <> '{APPLIED}'
"""

CHANGES = [
    "ALTER COLUMN size_bytes TYPE integer",
    "ALTER COLUMN folder TYPE varchar(80)",
    'ALTER COLUMN folder TYPE text COLLATE "C"',
    "ADD COLUMN more text",
    "DROP COLUMN folder",
    "DROP COLUMN folder, ADD COLUMN folder text",
    "DROP CONSTRAINT staging_reservations_pkey",
    "DROP CONSTRAINT staging_reservations_caf_file_id_fkey",
    "ALTER CONSTRAINT staging_reservations_caf_file_id_fkey DEFERRABLE",
]


@pytest.fixture
def connection(databases):
    with (
        databases.taken() as database,
        psycopg.connect(database.url, row_factory=namedtuple_row) as connection,
    ):
        yield connection
        connection.rollback()


def declared():
    """Yield a line as of `MADE` for each column, table and key of tables.py."""
    dialect = postgresql.dialect()
    for table in METADATA.tables.values():
        for column in table.columns:
            name, *collation = column.type.compile(dialect).partition(" COLLATE ")
            yield f"{column} {name.lower()}{''.join(collation)}"
        yield f"{table.name}: {', '.join(table.columns.keys())}"
        if table.primary_key:
            yield f"{table.name} PRIMARY KEY ({', '.join(table.primary_key.columns.keys())})"
        for key in table.foreign_key_constraints:
            targets = ", ".join(element.column.name for element in key.elements)
            columns = ", ".join(key.column_keys)
            target = f"{key.referred_table.name}({targets})"
            yield f"{table.name} FOREIGN KEY ({columns}) REFERENCES {target}"


def differences(connection):
    return {line for (line,) in connection.execute(MADE)} ^ set(declared())


def test_the_declared_tables_are_those_of_sql(connection):
    assert differences(connection) == set()


@pytest.mark.parametrize("change", CHANGES)
def test_changed_table_is_noticed(connection, change):
    connection.execute(f"ALTER TABLE staging_reservations {change}")
    assert differences(connection)


@pytest.mark.parametrize("statement", ["DROP TABLE run_progress", "CREATE TABLE more (a text)"])
def test_missing_or_additional_table_is_noticed(connection, statement):
    connection.execute(statement)
    assert differences(connection)


def test_tables_and_columns_have_comments(connection):
    columns = connection.execute(COMMENTS).fetchall()
    assert [column.name for column in columns if not (column.about and column.comment)] == []


def test_comments_of_nullable_columns_explain_null(connection):
    columns = connection.execute(COMMENTS).fetchall()
    assert [
        column.name for column in columns if column.nullable != ("NULL" in column.comment)
    ] == []


def test_references_without_foreign_key_name_a_column(connection):
    columns = connection.execute(COMMENTS).fetchall()
    targets = {column.comment.partition(" -> ")[2] for column in columns} - {""}
    assert targets
    assert targets <= {column.name for column in columns}


def test_the_page_of_the_schema_is_current(connection):
    page = runpy.run_path(str(DOCS / "schema_page.py"))["page"]
    written = (DOCS / "reference" / "schema.md").read_text(encoding="utf-8")
    assert written == page(connection), "run `make docs`"
