"""Two homes with a database each, one bucket and one wallet, on the command line."""

import os

import pytest

from caf_pipeline.cli.opening import opened_ledger
from caf_pipeline.settings import load_settings
from caf_pipeline.steps import inventories, planning
from caf_pipeline.wiring import open_run_context
from caf_pipeline_tests.support.command_line import source_text
from caf_pipeline_tests.support.jackal_command_line import jackal_command_line, wallet_with_space
from caf_pipeline_tests.support.new_ledgers import new_ledger  # noqa: F401 - a fixture

pytest_plugins = [
    "caf_pipeline_tests.support.dagster_home",
    "caf_pipeline_tests.support.jackal_network",
]


@pytest.fixture
def homes(tmp_path, network, s3_server, new_bucket, new_ledger):
    """Two homes that have planned the same object."""
    new_bucket.put("key", os.urandom(20_000))
    wallet, homes = wallet_with_space(network), []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        caf = jackal_command_line(
            tmp_path / name, network, wallet.words, CAF_DATABASE_URL=new_ledger().url
        )
        caf.settings(source_text(s3_server, new_bucket.name))
        homes.append(caf)
    for caf in homes:
        with caf.surroundings():
            settings = load_settings()
            with opened_ledger(settings) as ledger:
                context = open_run_context(settings, "src", run="run-1", ledger=ledger)
                planning.cut_plan(context, inventories.take_inventory(context))
                context.close()
    return homes


def test_the_refused_home_comes_back_by_withdraw_and_rebuild(homes, network, new_bucket):
    first, second = homes
    posted = len(network.state()["files"])
    assert first("run", "src").status == 0
    refused = second("run", "src")
    assert (refused.status, "caf withdraw" in refused.err) == (12, True)
    assert second("rebuild", "src").status != 0  # the planned chunk claims its objects
    assert second("withdraw", "src").status == 0
    assert second("run", "src").status == 7
    assert second("rebuild", "src", "--yes").status == 0
    assert second("run", "src").status == 0
    assert len(network.state()["files"]) == posted + 1

    new_bucket.put("new", b"new" * 5_000)
    assert first("run", "src").status == 0
    ahead = second("run", "src")
    assert (ahead.status, "caf doctor" in ahead.err) == (7, True)
    assert len(network.state()["files"]) == posted + 2
    assert b"not of this ledger" not in second("status").out  # the rebuild looked
