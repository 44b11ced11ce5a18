"""Runs are killed around and inside each step. The next run ends right.

`make reliability` and `make soak` also kill them at random moments. The long form uses many seeds;
the seed is in a failed test's name.
"""

import random

import pytest

from caf_pipeline_tests.faults.world import ONE_CHUNK
from caf_pipeline_tests.support.kills import AT_ITS_END, KILLED, Fatal

MOMENTS = {
    "load_batch": 40,
    "pack_chunk": 115,
    "seal_chunk": 20,
    "post_file": 120,
    "upload_chunk": 90,
    "verify_stored": 50,
    "load_locations": 14,
    "release_staging": 15,
}
"""About the number of moments of a step. A step with fewer is killed at its end."""

FEWEST = 14
"""Every step of a store that is a folder has more moments."""

PHASES = {
    "packing": ("pack_chunk",),
    "sealing": ("seal_chunk",),
    "posting": ("post_file",),
    "uploading": ("upload_chunk", "verify_stored"),
    "loading": ("load_locations", "release_staging"),
}
KILLS_OF_A_CHUNK = 4
"""The world has three chunks: a dozen kills of each phase."""

KILLS_OF_A_SOURCE = 12
SOAK_SEEDS = 12
"""Seeds of each test in the long form: 12 x (3 x 8 + 5 x 12 + 12) = 1,152 kills, and more."""


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize(
            "seed", range(SOAK_SEEDS if metafunc.config.getoption("--soak") else 1)
        )


@pytest.mark.parametrize("kind", ["jackal", "directory"])
@pytest.mark.parametrize(
    "where", ["before", pytest.param("inside", marks=pytest.mark.sample), "after"]
)
def test_runs_killed_at_successive_steps_are_each_resumed(fault, new_world, kind, where, seed):
    world = new_world(store={"kind": kind}, source={"target_size": ONE_CHUNK})
    world.fill(small=10, large=2)
    with fault("A run is killed", f"{where} each of its eight steps") as case:
        chance = random.Random(f"{where} {seed}")
        (chunk,) = world.plan()
        case.tried = len(MOMENTS)
        for step, count in MOMENTS.items():
            most = FEWEST if kind == "directory" and step != "pack_chunk" else count
            moment = {"before": 0, "inside": chance.randrange(1, most), "after": AT_ITS_END}[where]
            assert world.run(chunk, fatal=Fatal(step, moment)) == KILLED, world.runs[-1].printed
        world.finish()
        case.check(world)


@pytest.mark.soak
@pytest.mark.parametrize("phase", PHASES)
def test_run_killed_at_random_moments_is_finished_by_next(fault, world, phase, seed):
    with fault("A run is killed", f"at random moments of {phase}") as case:
        chance = random.Random(f"{phase} {seed}")
        chunks = world.plan()
        case.tried = 0
        for _ in range(KILLS_OF_A_CHUNK):
            for chunk in chunks:
                step = chance.choice(PHASES[phase])
                status = world.run(chunk, fatal=Fatal(step, chance.randrange(1, MOMENTS[step])))
                assert status == KILLED, world.runs[-1].printed
                case.tried += 1
        world.finish()
        case.check(world)


def test_run_killed_during_inventory_or_plan_is_finished_by_next(fault, world, seed):
    with fault("A run is killed", "at random moments of inventory and planning") as case:
        chance = random.Random(f"planning {seed}")
        case.tried = 0
        for step, most in (("take_inventory", 10), ("cut_plan", 60)) * (KILLS_OF_A_SOURCE // 2):
            assert world.run(fatal=Fatal(step, chance.randrange(most))) == KILLED, world.runs[
                -1
            ].printed
            case.tried += 1
        world.finish()
        case.check(world)


@pytest.mark.soak
def test_run_killed_repeatedly_from_outside_is_finished_eventually(fault, world, seed):
    with fault("A run is killed", "again and again, at random moments of its whole way") as case:
        chance = random.Random(f"whole way {seed}")
        case.tried = 0
        for _ in range(KILLS_OF_A_SOURCE):
            run = world.start(counted=True)
            run.wait_for_moments(chance.randrange(1, 260))
            case.tried += run.kill() == KILLED
        world.finish()
        case.check(world)
