"""What every test gets: the servers' fixtures, and an environment in which no developer's own AWS
settings count.
"""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from caf_pipeline.caf.merkle import IMPLEMENTATION
from caf_pipeline.ledger.embedded import PLACE_VARIABLE

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in a shell's background job; the tests of Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test measures time: how long an example takes tells of what else the machine does. Fixtures
# that a test shares among its examples are meant so.
settings.register_profile(
    "tests",
    settings(),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("few", settings.get_profile("tests"), max_examples=25)  # of `make test`
settings.load_profile("tests")

pytest_plugins = [
    "caf_pipeline_tests.support.certificates",
    "caf_pipeline_tests.support.dagster_storage",
    "caf_pipeline_tests.support.duckdb_storage",
    "caf_pipeline_tests.support.scheduling",
    "caf_pipeline_tests.support.selection",
    "caf_pipeline_tests.support.time_limit",
    "caf_pipeline_tests.support.shuffling",
    "caf_pipeline_tests.support.s3_server",
    "caf_pipeline_tests.support.unruly_s3",
    "caf_pipeline_tests.support.postgres",
    "caf_pipeline_tests.support.disks",
    "caf_pipeline_tests.support.jackal_network",
    "caf_pipeline_tests.support.jackal_contexts",
    "caf_pipeline_tests.faults.recording",
    "caf_pipeline_tests.support.age_tool",
    "caf_pipeline_tests.faults.fixtures",
]


_place = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep root's ledgers of homes in pytest's folders, which are private, in a folder of this
    session.
    """
    if (
        os.geteuid() == 0 and PLACE_VARIABLE not in os.environ
    ):  # a process of pytest-xdist inherits the variable
        config.stash[_place] = Path(tempfile.mkdtemp(prefix="caf-place-"))
        config.stash[_place].chmod(0o755)
        os.environ[PLACE_VARIABLE] = str(config.stash[_place])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove them."""
    if _place in config.stash:
        shutil.rmtree(config.stash[_place], ignore_errors=True)
        del os.environ[PLACE_VARIABLE]


def pytest_report_header() -> str:
    """Say once which of the two the tests use."""
    return f"Merkle roots are taken in {IMPLEMENTATION} code"


@pytest.fixture(autouse=True)
def _no_foreign_aws_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="session", autouse=True)
def signals_as_on_a_terminal():
    """Let SIGHUP end the processes that tests start, also if nohup started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
