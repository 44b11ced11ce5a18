"""Settings that change while the sensor lists the bucket: no object is missed."""

import pytest

from caf_pipeline.errors import LedgerError
from caf_pipeline_tests.support.event_queue import Queue
from caf_pipeline_tests.support.inventory_reports import ReportWriter
from caf_pipeline_tests.support.new_objects_ticks import NewObjectsTicks
from caf_pipeline_tests.support.pipeline_runs import SOURCE
from caf_pipeline_tests.support.s3_server import make_bucket

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

pytestmark = pytest.mark.thorough


@pytest.fixture
def ticks(pipeline, unruly_s3):
    """Ticks whose cursor has a part with new objects that is not planned yet."""
    ticks = NewObjectsTicks(pipeline, unruly_s3)
    ticks.put("a1 a2 c d")
    ticks.plan({})
    ticks.put("a0 m0 m1 m2 m3 m4 m5 z")
    while "since" not in (ticks.cursor or ""):
        ticks.next_part()
    return ticks


def claimed_after_a_round(ticks) -> int:
    """Tick until a whole cycle has nothing new, planning each part; return the claimed objects."""
    looked = 0
    while looked < 12:
        part = ticks.next_part()
        looked = 0 if part else looked + 1
        if part:
            ticks.plan(part)
    return ticks.pipeline.ledger.chunks.account(SOURCE).claimed_objects


def test_what_filters_no_longer_leave_out_is_planned(ticks):
    ticks.set(include=("z", "m3"))
    assert claimed_after_a_round(ticks) == 6
    ticks.set(include=(), exclude=("m1",))
    assert claimed_after_a_round(ticks) == 11
    ticks.set(exclude=())
    assert claimed_after_a_round(ticks) == 12


def test_reports_in_place_of_listings_and_back(ticks):
    bucket = ticks.pipeline.bucket
    reports = ReportWriter(bucket.client, bucket.name, make_bucket(bucket.endpoint).name)
    ticks.set(inventory=reports.folder)
    assert claimed_after_a_round(ticks) == 12
    ticks.put("n0 n1 n2 n3 n4")
    ticks.next_part()
    ticks.set(inventory="")
    assert claimed_after_a_round(ticks) == 17


def test_all_versions_in_place_of_the_current_ones_and_back(ticks):
    client, name = ticks.pipeline.bucket.client, ticks.pipeline.bucket.name
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    ticks.put("b m1 m1")
    ticks.set(versions="all")
    assert claimed_after_a_round(ticks) == 15  # a version "null" of m1, and two with an id
    ticks.set(versions="current")
    ticks.put("b x0 x1")
    assert claimed_after_a_round(ticks) == 18


def test_pages_listed_before_a_queue_is_set_are_planned(ticks):
    queue = Queue(ticks.pipeline)
    ticks.set(queue=queue.url)
    part = ticks.next_part()
    assert part == {"after": "m0", "until": "m2"}
    assert ticks.plan(part) == 6
    assert ticks.next_part() is None
    assert ticks.cursor == '{"after": "m2"}'


def test_a_changed_bucket_or_prefix_fails_each_tick(ticks):
    cursor, bucket = ticks.cursor, ticks.pipeline.bucket
    for changed in ({"prefix": "m"}, {"bucket": make_bucket(bucket.endpoint).name}):
        ticks.set(**changed)
        with pytest.raises(LedgerError, match="in the ledger"):
            ticks.next_part()
        ticks.set(prefix="", bucket=bucket.name)
    assert ticks.cursor == cursor
    assert claimed_after_a_round(ticks) == 12
