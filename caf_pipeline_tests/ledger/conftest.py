"""The ledger of the tests in this folder."""

import pytest

from caf_pipeline.ledger.ledger import Ledger


@pytest.fixture
def ledger(database):
    return Ledger(database, lease_seconds=1.0)  # a test that meets a held lease waits for a renewal
