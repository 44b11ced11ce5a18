"""Services are killed and restarted under a run: Postgres, S3, chain, provider, pooler.

The run is paused during the kill, so that it meets it in the named phase. In one form it finds the
service restarted behind broken connections, in the other it finds none. The next run ends right.
"""

import random
import signal
from functools import partial

import pytest

from caf_pipeline_tests.faults.own_postgres import OwnPostgres
from caf_pipeline_tests.support.kills import KILLED, Fatal
from caf_pipeline_tests.support.pgbouncer import running_pooler

GROUP = "A service is killed and started again"

PAUSED_AT = {
    "packing": Fatal("pack_chunk", 60, signal.SIGSTOP),
    "posting": Fatal("post_file", 60, signal.SIGSTOP),
    "uploading": Fatal("upload_chunk", 40, signal.SIGSTOP),
    "verifying": Fatal("verify_stored", 20, signal.SIGSTOP),
    "loading": Fatal("load_locations", 7, signal.SIGSTOP),
}


FIRST_PAGE = Fatal("take_inventory", 3, signal.SIGSTOP)


@pytest.fixture(scope="module")
def postgres():
    with OwnPostgres() as running:
        yield running


@pytest.fixture
def world_of(request, new_world, network, unruly_s3, new_bucket):
    """Makes a world; returns it with how its service is killed and started, for the two runs."""

    def make(service):
        match service:
            case "Postgres":
                server = request.getfixturevalue("postgres")
                world = new_world(database_url=server.new_database())
            case "the S3 server":
                server = unruly_s3
                bucket = server.in_front_of(new_bucket)
                world = new_world(bucket=bucket, packing={"request_attempts": 3})
            case "the chain and all providers":
                world, server = new_world(), network
            case "a provider":
                kills = [partial(network.kill_provider, number) for number in (0, 1)]
                starts = [partial(network.start_provider, number) for number in (0, 1)]
                return new_world(), list(zip(kills, starts, strict=True))
        return world, [(server.kill, server.start)] * 2

    return make


def killed_under(world, chunk, at, kill, start, *, without_service):
    """Run a chunk; kill and restart a service at a moment; return when the run has ended."""
    run = world.start(chunk, fatal=at)
    run.wait_until_paused()
    kill()
    if not without_service:
        start()
    run.resume()
    assert run.ended_in_order, run.printed
    if without_service:
        start()


@pytest.mark.parametrize(
    ("service", "phase"),
    [
        ("Postgres", "packing"),
        ("Postgres", "posting"),
        ("Postgres", "loading"),
        ("the S3 server", "packing"),
        ("the S3 server", "the inventory is taken"),
        ("the chain and all providers", "posting"),
        ("the chain and all providers", "uploading"),
        ("the chain and all providers", "verifying"),
        pytest.param("a provider", "uploading", marks=pytest.mark.sample),
    ],
)
def test_service_killed_under_a_run_loses_nothing(fault, world_of, service, phase):
    with fault(GROUP, f"{service}, while {phase}") as case:
        world, ways = world_of(service)
        world.fill()
        case.tried = len(ways)
        at = PAUSED_AT.get(phase, FIRST_PAGE)
        chunks = ["", ""] if at is FIRST_PAGE else world.plan()
        # An inventory that succeeds leaves nothing for a second run: that one is last.
        order = [True, False] if at is FIRST_PAGE else [False, True]
        for chunk, (kill, start), without_service in zip(chunks, ways, order, strict=False):
            killed_under(world, chunk, at, kill, start, without_service=without_service)
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
            world, first, PAUSED_AT["posting"], pooler.kill, pooler.start, without_service=False
        )
        killed_under(
            world, second, PAUSED_AT["loading"], pooler.kill, pooler.start, without_service=True
        )
        world.finish()
        case.check(world)
