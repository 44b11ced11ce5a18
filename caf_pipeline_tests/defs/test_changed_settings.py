"""Settings of a source that change while its sensor is in the middle of a round: no object is
missed without a word.
"""

import pytest

from caf_pipeline.errors import LedgerError
from caf_pipeline_tests.automation.test_event_queue import Queue
from caf_pipeline_tests.automation.test_sensors import SOURCE, Looks
from caf_pipeline_tests.support.inventory_reports import ReportWriter
from caf_pipeline_tests.support.s3_server import make_bucket

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

pytestmark = pytest.mark.thorough


@pytest.fixture
def looks(pipeline, unruly_s3):
    """Looks, of which the last has left a part of the bucket that is wholly new, goes on behind it,
    and is not planned yet.
    """
    looks = Looks(pipeline, unruly_s3)
    looks.put("a1 a2 c d")
    looks.plan({})
    looks.put("a0 m0 m1 m2 m3 m4 m5 z")
    while "since" not in (looks.cursor or ""):
        looks.look()
    return looks


def claimed_after_a_round(looks) -> int:
    """Look on until a round has nothing new, and plan what is asked for; return how many objects
    are claimed then.
    """
    looked = 0
    while looked < 12:
        part = looks.look()
        looked = 0 if part else looked + 1
        if part:
            looks.plan(part)
    return looks.pipeline.ledger.chunks.account(SOURCE).claimed_objects


def test_what_filters_no_longer_leave_out_is_planned(looks):
    looks.set(include=("z", "m3"))
    assert claimed_after_a_round(looks) == 6
    looks.set(include=(), exclude=("m1",))
    assert claimed_after_a_round(looks) == 11
    looks.set(exclude=())
    assert claimed_after_a_round(looks) == 12


def test_reports_in_place_of_listings_and_back(looks):
    bucket = looks.pipeline.bucket
    reports = ReportWriter(bucket.client, bucket.name, make_bucket(bucket.endpoint).name)
    looks.set(inventory=reports.folder)
    assert claimed_after_a_round(looks) == 12
    looks.put("n0 n1 n2 n3 n4")
    looks.look()
    looks.set(inventory="")
    assert claimed_after_a_round(looks) == 17


def test_all_versions_in_place_of_the_current_ones_and_back(looks):
    client, name = looks.pipeline.bucket.client, looks.pipeline.bucket.name
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    looks.put("b m1 m1")
    looks.set(versions="all")
    assert claimed_after_a_round(looks) == 15  # a version "null" of m1, and two with an id
    looks.set(versions="current")
    looks.put("b x0 x1")
    assert claimed_after_a_round(looks) == 18


def test_pages_listed_before_a_queue_is_set_are_planned(looks):
    queue = Queue(looks.pipeline)
    looks.set(queue=queue.url)
    part = looks.look()
    assert part == {"after": "m0", "until": "m2"}
    assert looks.plan(part) == 6
    assert looks.look() is None
    assert looks.cursor == '{"after": "m2"}'


def test_a_changed_bucket_or_prefix_fails_each_tick(looks):
    cursor, bucket = looks.cursor, looks.pipeline.bucket
    for changed in ({"prefix": "m"}, {"bucket": make_bucket(bucket.endpoint).name}):
        looks.set(**changed)
        with pytest.raises(LedgerError, match="in the ledger"):
            looks.look()
        looks.set(prefix="", bucket=bucket.name)
    assert looks.cursor == cursor
    assert claimed_after_a_round(looks) == 12
