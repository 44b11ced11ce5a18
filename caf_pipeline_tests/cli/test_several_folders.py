"""The store of several folders, which other tests use, passes the store's contract."""

import pytest

from caf_pipeline_tests.contracts.chunk_store import ChunkStoreContract
from caf_pipeline_tests.support.several_folders import SeveralFolders


@pytest.fixture
def store(tmp_path):
    return SeveralFolders(tmp_path / "store")


class TestSeveralFolders(ChunkStoreContract):
    pass
