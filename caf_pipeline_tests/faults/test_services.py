"""Services are killed and restarted under a run: Postgres, S3, chain, provider, pooler.

The run is paused during the kill, so that it meets it in the named phase. In one form it finds the
service restarted behind broken connections, in the other it finds none. The next run ends right.
"""

import random
import signal

import pytest

from caf_pipeline_tests.faults.kept_s3 import KeptS3
from caf_pipeline_tests.faults.moments import Fatal
from caf_pipeline_tests.faults.own_postgres import OwnPostgres
from caf_pipeline_tests.support.pgbouncer import running_pooler

GROUP = "A service is killed and started again"
KILLED = -signal.SIGKILL

PAUSED_AT = {
    "packing": Fatal("pack_chunk", 60, signal.SIGSTOP),
    "posting": Fatal("post_file", 60, signal.SIGSTOP),
    "uploading": Fatal("upload_chunk", 40, signal.SIGSTOP),
    "verifying": Fatal("verify_stored", 20, signal.SIGSTOP),
    "loading": Fatal("load_locations", 7, signal.SIGSTOP),
}


@pytest.fixture(scope="module")
def postgres():
    with OwnPostgres() as running:
        yield running


@pytest.fixture(scope="module")
def kept_s3(tmp_path_factory):
    with KeptS3(tmp_path_factory.mktemp("s3")) as running:
        yield running


def killed_under(world, chunk, at, kill, start, *, meets_nobody):
    """Run a chunk; kill and restart a service at a moment; return when the run has ended."""
    run = world.start(chunk, fatal=at)
    run.wait_until_paused()
    kill()
    if not meets_nobody:
        start()
    run.resume()
    assert run.ended_in_order, run.said
    if meets_nobody:
        start()


@pytest.mark.parametrize("phase", ["packing", "posting", "loading"])
def test_postgres_killed_under_a_run_loses_nothing(fault, new_world, postgres, phase):
    world = new_world(database_url=postgres.new_database())
    with fault(GROUP, f"Postgres, while {phase}") as case:
        world.fill()
        first, second, _ = world.plan()
        case.tried = 2
        killed_under(
            world, first, PAUSED_AT[phase], postgres.kill, postgres.start, meets_nobody=False
        )
        killed_under(
            world, second, PAUSED_AT[phase], postgres.kill, postgres.start, meets_nobody=True
        )
        world.finish()
        case.check(world)


def test_the_s3_server_killed_under_a_packing_loses_nothing(fault, new_world, kept_s3):
    world = new_world(bucket=kept_s3.make_bucket(), packing={"request_attempts": 3})
    with fault(GROUP, "the S3 server, while packing") as case:
        world.fill()
        first, second, _ = world.plan()
        case.tried = 2
        killed_under(
            world, first, PAUSED_AT["packing"], kept_s3.kill, kept_s3.start, meets_nobody=False
        )
        killed_under(
            world, second, PAUSED_AT["packing"], kept_s3.kill, kept_s3.start, meets_nobody=True
        )
        world.finish()
        case.check(world)


def test_the_s3_server_killed_under_an_inventory_loses_nothing(fault, new_world, kept_s3):
    world = new_world(bucket=kept_s3.make_bucket(), packing={"request_attempts": 3})
    with fault(GROUP, "the S3 server, while the inventory is taken") as case:
        world.fill()
        case.tried = 2
        listing = Fatal("take_inventory", 3, signal.SIGSTOP)
        killed_under(world, "", listing, kept_s3.kill, kept_s3.start, meets_nobody=True)
        killed_under(world, "", listing, kept_s3.kill, kept_s3.start, meets_nobody=False)
        world.finish()
        case.check(world)


@pytest.mark.parametrize("phase", ["posting", "uploading", "verifying"])
def test_chain_killed_during_run_loses_nothing_and_charges_once(fault, world, network, phase):
    with fault(GROUP, f"the chain and all providers, while {phase}") as case:
        first, second, _ = world.plan()
        case.tried = 2
        killed_under(
            world, first, PAUSED_AT[phase], network.kill, network.start, meets_nobody=False
        )
        killed_under(
            world, second, PAUSED_AT[phase], network.kill, network.start, meets_nobody=True
        )
        world.finish()
        case.check(world)


@pytest.mark.sample
def test_provider_killed_during_upload_loses_nothing_and_charges_once(fault, world, network):
    with fault(GROUP, "a provider, while uploading") as case:
        first, second, _ = world.plan()
        case.tried = 2
        for provider, (chunk, meets_nobody) in enumerate([(first, False), (second, True)]):
            kill, start = (
                lambda one=provider: network.kill_provider(one),
                lambda one=provider: network.start_provider(one),
            )
            killed_under(
                world, chunk, PAUSED_AT["uploading"], kill, start, meets_nobody=meets_nobody
            )
        world.finish()
        case.check(world)


def test_runs_behind_killed_pooler_lose_nothing(fault, new_world, database_url):
    what = "pgbouncer in transaction mode, under runs that are killed too"
    with fault(GROUP, what) as case, running_pooler(database_url) as pooler:
        world = new_world(database_url=pooler.url)
        world.fill()
        first, second, third = world.plan()
        chance = random.Random("pooler")
        case.tried = 6
        for step, most in (
            ("pack_chunk", 40),
            ("post_file", 100),
            ("upload_chunk", 60),
            ("load_locations", 12),
        ):
            assert world.run(third, fatal=Fatal(step, chance.randrange(1, most))) == KILLED
        killed_under(
            world, first, PAUSED_AT["posting"], pooler.kill, pooler.start, meets_nobody=False
        )
        killed_under(
            world, second, PAUSED_AT["loading"], pooler.kill, pooler.start, meets_nobody=True
        )
        world.finish()
        case.check(world)
