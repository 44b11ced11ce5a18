"""A run ends while it posts, and another wallet continues: the post is not paid again."""

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline_tests.faults.world import CHUNK_STEPS, ONE_CHUNK
from caf_pipeline_tests.support.jackal_command_line import wallet_with_space


def archive(world, chunk):
    with world.run_context("a run") as context:
        for step in CHUNK_STEPS:
            step(context, chunk)


@pytest.mark.parametrize("sent", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_post_signed_by_another_wallet_is_not_paid_twice(new_world, monkeypatch, sent):
    world = new_world(source={"target_size": ONE_CHUNK})
    world.fill(small=6)
    (chunk,) = world.plan()
    broadcast = Chain.broadcast

    def end(*arguments):
        if sent:
            broadcast(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Chain, "broadcast", end)
        with pytest.raises(KeyboardInterrupt):
            archive(world, chunk)
    (pending,) = world.query("SELECT account FROM transactions WHERE outcome IS NULL")
    assert pending[0].endswith(world.address)
    world._words = wallet_with_space(world.network).words
    archive(world, chunk)
    (archived,) = world.chunks()
    assert archived.state is ChunkState.LOCATED
    assert archived.owner == world.address  # its transaction was sent again and is in a block
    posts = [
        file
        for file in world.network.state()["files"]
        if file["merkle"] == archived.merkle_root.hex()
    ]
    assert len(posts) == 1
    assert world.query("SELECT outcome FROM transactions") == [("included",)]
