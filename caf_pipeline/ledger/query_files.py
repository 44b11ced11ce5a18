"""The SQL statements in `queries/`, one in each file, with psycopg's placeholders."""

from functools import cache
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).with_name("queries")


@cache
def query(name: str) -> str:
    """Return the statement of `queries/<name>.sql`."""
    return (_FOLDER / f"{name}.sql").read_text("utf-8")
