"""The store of the tests in this folder."""

import pytest

from caf_pipeline_tests.support.several_folders import SeveralFolders


@pytest.fixture
def store(tmp_path):
    """Three providers."""
    return SeveralFolders(tmp_path / "several")
