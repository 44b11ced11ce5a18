"""`World.examine` finds faults; a matrix that cannot fail would prove nothing."""

import io
import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest

from caf_pipeline_tests.faults.runner import Template
from caf_pipeline_tests.faults.world import ONE_CHUNK


@pytest.fixture
def located(new_world):
    world = new_world(source={"target_size": ONE_CHUNK})
    world.fill(small=3, large=0)
    world.finish()
    return world


def change(world, statement):
    with psycopg.connect(world.database_url) as connection:
        assert connection.execute(statement).rowcount == 1


@pytest.fixture
def told():
    """A template whose process is this pipe's other end."""
    said, say = os.pipe()
    template = Template()
    template._statuses, template._unread = {}, b""
    with open(said, "rb") as heard, open(say, "w") as pipe:
        template._process = SimpleNamespace(stdin=io.BytesIO(), stdout=heard)
        yield template, lambda **line: print(json.dumps(line), file=pipe, flush=True)


def test_run_is_not_mistaken_for_earlier_one_with_same_pid(told):
    template, say = told
    say(begun=7)
    say(ended=7, status=-9)
    assert template.status(template.begin(Path("first.json"))) == -9
    say(begun=7)
    second = template.begin(Path("second.json"))
    assert template.status(second, wait=False) is None
    say(ended=7, status=0)
    assert template.status(second) == 0


def test_template_works_in_session_with_many_open_files(told):
    template, say = told
    many = 1024  # which select() cannot take (FD_SETSIZE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, many + 1), hard))
    heard = template._process.stdout
    try:
        os.dup2(heard.fileno(), many)
        with open(many, "rb") as template._process.stdout:
            say(begun=7)
            assert template.begin(Path("an.json")) == 7
    finally:
        template._process.stdout = heard
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.thorough
def test_a_world_in_which_nothing_went_wrong_has_no_complaints(located):
    verdict = located.check()
    assert (verdict.objects, verdict.size_bytes) == (
        len(located.objects),
        sum(map(len, located.objects.values())),
    )


@pytest.mark.thorough
def test_an_object_without_a_location_is_lost(located):
    change(located, "DELETE FROM file_locations WHERE file_path = 'empty'")
    assert located.examine().lost == 1


@pytest.mark.thorough
def test_an_object_that_reads_back_as_other_bytes_is_lost(located):
    change(
        located,
        "UPDATE file_locations SET start_byte = start_byte + 1 WHERE file_path LIKE 'some/%0'",
    )
    assert located.examine().lost == 1


@pytest.mark.thorough
def test_an_object_that_came_after_the_last_run_is_lost(located):
    located.put("late", b"late")
    assert located.examine().lost == 1


@pytest.mark.thorough
def test_a_member_of_two_chunks_is_double(located):
    change(located, "UPDATE caf_files SET member_count = member_count + 1 WHERE state = 'located'")
    assert located.examine().double == 1


@pytest.mark.thorough
def test_space_that_was_not_due_is_charged_twice(located):
    change(
        located,
        "UPDATE caf_files SET stored_size_bytes = stored_size_bytes - 1 WHERE state = 'located'",
    )
    assert located.examine().overcharged_bytes == 3


@pytest.mark.thorough
def test_a_file_left_in_staging_is_complained_of(located):
    (located.staging / "left.part").touch()
    with pytest.raises(AssertionError, match=r"left\.part"):
        located.check()


@pytest.mark.thorough
def test_a_traceback_of_a_run_is_complained_of(located):
    run = located.start("src-00000000-00001")
    run.wait()
    with open(f"{run.order.answer}.err", "a") as errors:
        errors.write("Traceback")
    with pytest.raises(AssertionError, match="Traceback"):
        located.check()
