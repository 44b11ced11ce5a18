"""The age tool, built by Go."""

import os
import shutil
import subprocess

import pytest


@pytest.fixture(scope="session")
def age_tool(tmp_path_factory):
    """The age tool 1.3.2."""
    if not shutil.which("go"):
        pytest.skip("Go builds the age tool, and is missing")
    folder = tmp_path_factory.mktemp("age")
    package = "filippo.io/age/cmd/age@v1.3.2"
    subprocess.run(
        ["go", "install", package],
        env={**os.environ, "GOBIN": str(folder)},
        capture_output=True,
        check=True,
        timeout=300,
    )
    return folder / "age"
