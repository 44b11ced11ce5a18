"""Fixtures of worlds.

world        a filled world                          new_world     makes an empty one, settings
changed template     the process that begins runs, for the session
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from caf_pipeline_tests.faults.runner import Template, running_template
from caf_pipeline_tests.faults.world import World
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.s3_server import Bucket


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """The process that begins runs."""
    with running_template() as template:
        yield template


@pytest.fixture
def new_world(
    tmp_path: Path,
    new_bucket: Bucket,
    database_url: str,
    network: LoopbackNetwork,
    template: Template,
) -> Iterator[Callable[..., World]]:
    """Makes a world over an empty bucket; takes what `World` takes, in place of what the fixtures
    give. Once in a test.
    """
    made: list[World] = []

    def make(**changes: Any) -> World:
        parts = {
            "bucket": new_bucket,
            "database_url": database_url,
            "network": network,
            "template": template,
        }
        made.append(World(tmp_path / "world", **parts | changes))
        return made[-1]

    yield make
    for world in made:
        world.end_runs()


@pytest.fixture
def world(new_world: Callable[..., World]) -> World:
    """A world whose bucket has objects: small, empty and large ones."""
    world = new_world()
    world.fill()
    return world
