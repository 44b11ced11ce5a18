"""A run is killed at any moment; the next run of the partition ends right."""

import os

import pytest

from caf_pipeline_tests.support import dying_runs
from caf_pipeline_tests.support.run_contexts import a_run_context, plan
from caf_pipeline_tests.support.tiers import sampled

EVERY = int(os.environ.get("CAF_TEST_KILL_EVERY", "13"))
"""One kill per this many moments of a run; 1 tries them all."""

MOMENTS = 190
"""Minimum number of moments in a run of this chunk; a test checks it."""


@pytest.fixture
def context(tmp_path, ledger):
    return a_run_context(tmp_path, dying_runs.a_steady_source(), ledger, target="8MiB")


@pytest.mark.thorough
def test_a_run_has_the_moments_that_are_tried(context, tmp_path, database_url):
    (chunk,) = plan(context).chunks
    assert dying_runs.run(tmp_path, database_url, chunk.name) >= MOMENTS
    dying_runs.ends_right(context, chunk.name)


@pytest.mark.parametrize("fatal", sampled(range(1, MOMENTS + 1, EVERY), every=5))
def test_run_killed_at_any_moment_is_finished_by_next(context, tmp_path, database_url, fatal):
    (chunk,) = plan(context).chunks
    assert dying_runs.run(tmp_path, database_url, chunk.name, fatal=fatal) is None, (
        "it was not killed"
    )
    dying_runs.run(tmp_path, database_url, chunk.name)
    dying_runs.ends_right(context, chunk.name)


@pytest.mark.thorough
def test_run_killed_repeatedly_is_finished_in_the_end(context, tmp_path, database_url):
    (chunk,) = plan(context).chunks
    for fatal in range(5, MOMENTS, 23):
        dying_runs.run(tmp_path, database_url, chunk.name, fatal=fatal)
    dying_runs.run(tmp_path, database_url, chunk.name)
    dying_runs.ends_right(context, chunk.name)
