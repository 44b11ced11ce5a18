"""Fixtures: `world` is filled, `new_world` makes an empty one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from caf_pipeline_tests.faults.world import World
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.s3_server import Bucket


@pytest.fixture
def new_world(
    tmp_path: Path,
    new_bucket: Bucket,
    database_url: str,
    network: LoopbackNetwork,
) -> Iterator[Callable[..., World]]:
    """Makes a world with an empty bucket, once in a test. Takes the arguments of `World`."""
    made: list[World] = []

    def make(**changes: Any) -> World:
        parts = {"bucket": new_bucket, "database_url": database_url, "network": network}
        made.append(World(tmp_path / "world", **parts | changes))
        return made[-1]

    yield make
    for world in made:
        world.end_runs()


@pytest.fixture
def world(new_world: Callable[..., World]) -> World:
    """A world whose bucket has small, empty and large objects."""
    world = new_world()
    world.fill()
    return world
