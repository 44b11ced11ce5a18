"""Writes docs/reference/schema.md from the ledger's declared tables.

Run `python docs/schema_page.py docs/reference/schema.md`.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from sqlalchemy import CheckConstraint, Column, Dialect, Index, Table, UniqueConstraint
from sqlalchemy.dialects import postgresql

from caf_pipeline.ledger.tables import METADATA, REFERS_TO

_OPENING: Final = """\
# The ledger's tables

`make docs` writes this page from `caf_pipeline/ledger/tables.py`, and a test keeps it current. The
files of `sql/` create the tables, views and indexes. Another test compares them with the declared
tables. [Design](../explanation/design.md) explains the terms.

Unless a comment says otherwise, times come from the database's clock and sizes are in bytes.
`text C` has the collation "C": it is compared as bytes. The ledger has one more table,
`schema_files`. It has the name and the SHA-256 of each file of `sql/` that created the ledger.

A solid line is a foreign key. A dotted line is a reference without a foreign key.
"""
_DIALECT: Final[Dialect] = postgresql.dialect()  # type: ignore[no-untyped-call]


def page() -> str:
    """Return the text of docs/reference/schema.md."""
    tables = METADATA.tables.values()
    drawing = [line for table in tables for line in _references(table) or [f"    {table.name}"]]
    return (
        "\n".join(
            [
                _OPENING,
                "```mermaid",
                "erDiagram",
                *drawing,
                "```",
                *(_section(table) for table in tables),
            ]
        )
        + "\n"
    )


def _references(table: Table) -> list[str]:
    """Return a line of the drawing for each reference from this table to another table."""
    keys = sorted(
        table.foreign_key_constraints, key=lambda key: list(table.columns).index(key.columns[0])
    )
    solid = [_line("--", key.referred_table.name, table, list(key.columns)) for key in keys]
    logical = [
        (column.info[REFERS_TO], column) for column in table.columns if REFERS_TO in column.info
    ]
    return solid + [
        _line("..", target.partition(".")[0], table, [column]) for target, column in logical
    ]


def _line(stroke: str, target: str, table: Table, columns: list[Column[Any]]) -> str:
    at_target = "|o" if any(column.nullable for column in columns) else "||"
    at_table = "o|" if list(table.primary_key) == columns else "o{"
    return f'    {target} {at_target}{stroke}{at_table} {table.name} : "{_names(columns)}"'


def _section(table: Table) -> str:
    """Return the section about a table."""
    rows = [
        f"| `{column.name}` | {_type(column)} | {'yes' if column.nullable else ''} | "
        f"{_default(column)} | {_comment(column)} |"
        for column in table.columns
    ]
    heading = [
        "",
        f"## {table.name}",
        "",
        table.comment or "",
        "",
        "| column | type | null | default | comment |",
        "|---|---|---|---|---|",
    ]
    keys = list(_keys(table))
    return "\n".join([*heading, *rows, *([""] if keys else []), *keys])


def _type(column: Column[Any]) -> str:
    name, _, collation = column.type.compile(dialect=_DIALECT).partition(" COLLATE ")
    name = name.lower().replace("timestamp with time zone", "timestamptz")
    return f"{name} {collation}".replace('"', "").strip()


def _default(column: Column[Any]) -> str:
    default: Any = column.server_default
    return "identity" if column.identity else f"`{default.arg}`" if default else ""


def _comment(column: Column[Any]) -> str:
    """Return a column's comment and its references as a Markdown cell."""
    targets = [key.target_fullname for key in column.foreign_keys]
    if REFERS_TO in column.info:
        targets.append(column.info[REFERS_TO])
    references = "".join(f" (→ `{target}`)" for target in targets)
    return (column.comment or "").replace("<", "\\<").replace("|", "\\|") + references


def _keys(table: Table) -> Iterator[str]:
    """Yield a line for each key, check and index of a table."""
    if len(table.primary_key):
        yield f"- primary key: `{_names(table.primary_key)}`"
    yield from sorted(
        f"- unique: `{_names(key.columns)}`"
        for key in table.constraints
        if isinstance(key, UniqueConstraint)
    )
    constraints = table.constraints.union(*(column.constraints for column in table.columns))
    checks = [check for check in constraints if isinstance(check, CheckConstraint)]
    yield from sorted(
        f"- check{f' {check.name}' if check.name else ''}: `{check.sqltext}`" for check in checks
    )
    yield from map(_index, sorted(table.indexes, key=lambda index: str(index.name)))


def _index(index: Index) -> str:
    options = index.dialect_options["postgresql"]
    using = f" ({options['using']})" if options["using"] else ""
    where = f" where `{options['where']}`" if options["where"] is not None else ""
    return (
        f"- {'unique ' if index.unique else ''}index {index.name}{using}: "
        f"`{_names(index.columns)}`{where}"
    )


def _names(columns: Iterable[Column[Any]]) -> str:
    return ", ".join(column.name for column in columns)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
