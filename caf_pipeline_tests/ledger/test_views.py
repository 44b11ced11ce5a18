"""SQLAlchemy's views agree with the database's."""

import pytest
from sqlalchemy import create_engine, inspect
from sqlalchemy.pool import NullPool

from caf_pipeline.ledger.views import VIEWS


@pytest.mark.parametrize("view", VIEWS.sorted_tables, ids=str)
def test_a_view_has_the_columns_of_the_database(database, view):
    engine = create_engine("postgresql+psycopg://", creator=database.connect, poolclass=NullPool)
    reflected = {
        column["name"]: column["type"].compile(engine.dialect)
        for column in inspect(engine).get_columns(view.name)
    }
    assert {
        column.name: column.type.compile(engine.dialect) for column in view.columns
    } == reflected
