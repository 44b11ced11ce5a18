"""`World.examine` finds faults; a matrix that cannot fail would prove nothing."""

import psycopg
import pytest

from caf_pipeline_tests.faults.world import ONE_CHUNK


@pytest.fixture
def located(new_world):
    world = new_world(source={"target_size": ONE_CHUNK})
    world.fill(small=3, large=0)
    world.finish()
    return world


@pytest.mark.thorough
def test_a_world_in_which_nothing_went_wrong_has_no_complaints(located):
    verdict = located.check()
    assert (verdict.objects, verdict.size_bytes) == (
        len(located.objects),
        sum(map(len, located.objects.values())),
    )


CHANGES = [
    ("DELETE FROM file_locations WHERE file_path = 'empty'", "lost", 1),
    (
        "UPDATE file_locations SET start_byte = start_byte + 1 WHERE file_path LIKE 'some/%0'",
        "lost",
        1,
    ),
    ("UPDATE caf_files SET member_count = member_count + 1 WHERE state = 'located'", "double", 1),
    (
        "UPDATE caf_files SET stored_size_bytes = stored_size_bytes - 1 WHERE state = 'located'",
        "overcharged_bytes",
        3,
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("statement", "field", "count"), CHANGES)
def test_a_row_that_is_wrong_is_found(located, statement, field, count):
    with psycopg.connect(located.database_url) as connection:
        assert connection.execute(statement).rowcount == 1
    assert getattr(located.examine(), field) == count


@pytest.mark.thorough
def test_an_object_that_came_after_the_last_run_is_lost(located):
    located.put("late", b"late")
    assert located.examine().lost == 1


def test_a_file_left_in_staging_is_complained_of(located):
    (located.staging / "left.part").touch()
    with pytest.raises(AssertionError, match=r"left\.part"):
        located.check()


@pytest.mark.thorough
def test_a_traceback_of_a_run_is_complained_of(located):
    run = located.start("src-00000000-00001")
    run.wait()
    (located.folder / f"{run.name}.printed").write_text("Traceback")
    with pytest.raises(AssertionError, match="Traceback"):
        located.check()
