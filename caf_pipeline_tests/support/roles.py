"""The roles of sql/roles.sql in a test's database."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from caf_pipeline.system.package_files import package_file

ROLES = ("caf_reader", "caf_worker", "caf_verifier")


@contextmanager
def granted_roles(database_url: str) -> Iterator[Callable[[str], str]]:
    """Grant the roles in a context. Yields a function that returns a role's address."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute((package_file("sql") / "roles.sql").read_bytes())
    yield lambda role: f"{database_url}&options=-c%20role%3D{role}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        for role in ROLES:
            connection.execute(f"DROP OWNED BY {role}")
