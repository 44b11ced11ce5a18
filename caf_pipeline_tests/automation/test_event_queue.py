"""New objects by S3's events, which may be lost, duplicated, late, out of order, or foreign."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import quote_plus, unquote_to_bytes

import pytest

from caf_pipeline.automation import new_objects_tick
from caf_pipeline.errors import SourceError
from caf_pipeline.inventory.key_split import just_before
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.inventory.snapshot import read_objects
from caf_pipeline.ledger import notices as ledger_notices
from caf_pipeline.ledger.engine import Lock
from caf_pipeline.ledger.records import Skip
from caf_pipeline.settings import AlertSettings, SourceSettings
from caf_pipeline.source.protocol import ObjectEvent, QueueMessage
from caf_pipeline.source.s3 import queue as s3_queue
from caf_pipeline.source.s3.queue import events_of, open_event_queue
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.steps.conditions import ConditionKind, find_conditions
from caf_pipeline.steps.notices import drain_queue, scan_noticed
from caf_pipeline_tests.support.event_queue import SENSOR, Queue
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.pipeline_runs import SOURCE, with_source
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_chunk, plan
from caf_pipeline_tests.support.ticks import evaluate_tick, silent_server

pytestmark = pytest.mark.thorough

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

INVENTORY = "caf_my_source__s3_inventory"
ODD_KEYS = ["a b", "a+b", "a%2Fb", "a%20b", "é", "100 %", 'q"\\', "\U00010000?&=", "%%%"]


def by_eventbridge(its, kind="Object Created", **changes):
    """Return the example of "EventBridge event message structure" in the S3 User Guide."""
    detail = {
        "version": "0",
        "bucket": {"name": "b"},
        "object": its,
        "request-id": "N4N7GDK58NMKJ12R",
        "reason": "PutObject",
    }
    envelope = {
        "version": "0",
        "id": "17793124-05d4-b198-2fde-7ededc63b103",
        "detail-type": kind,
        "source": "aws.s3",
    }
    return (
        envelope
        | {"account": "111122223333", "resources": ["arn:aws:s3:::b"], "detail": detail}
        | changes
    )


@pytest.fixture
def queue(pipeline):
    return Queue(pipeline)


def test_put_objects_are_planned_with_their_part_of_the_bucket(queue):
    queue.bucket.put("aaa/before-the-queue", b"1")
    queue.plan()
    queue.notify()
    for key in ("new/a b+ü.txt", "new/c", "new/d"):
        queue.bucket.put(key, b"2")
    tick = queue.tick()
    (request,) = tick.run_requests
    window = request.run_config["ops"][INVENTORY]["config"]
    assert window["until"] == "new/d"
    assert b"new/a b" < unquote_to_bytes(window["after"]) < "new/a b+ü.txt".encode()
    assert queue.left() == 0
    assert len(queue.noticed()) == 3  # until a listing has them
    queue.plan(request)
    assert queue.noticed() == []
    assert queue.pipeline.ledger.chunks.account(SOURCE).claimed_objects == 4

    for chunk in queue.pipeline.chunks():
        archive_chunk(queue.context, chunk)
    queue.bucket.delete("new/c")
    (request,) = queue.tick(tick.cursor).run_requests
    queue.plan(request)
    assert queue.context.ledger.lookup.locate(SOURCE, "new/c").status == "gone"
    tick = queue.tick()
    assert tick.run_requests == []
    assert tick.skip_message.startswith("Nothing new:")


def test_eventbridge_events_have_plain_keys(queue):
    queue.notify_by_eventbridge()
    for key in ODD_KEYS:
        queue.bucket.put(key, b"1")
    queue.bucket.delete(ODD_KEYS[0])
    tick = queue.tick()
    assert (queue.left(), queue.context.ledger.notices.messages_set_apart(SOURCE)) == (0, [])
    assert queue.noticed() == sorted(key.encode() for key in ODD_KEYS)
    queue.plan(tick.run_requests[0])
    assert queue.noticed() == []
    assert queue.pipeline.ledger.chunks.account(SOURCE).claimed_objects == len(ODD_KEYS) - 1


def test_keys_with_control_characters_are_planned(queue):
    keys = ["\0nul", "a\x01b", "c\uffff"]
    queue.notify()
    for key in keys:
        queue.bucket.put(key, b"1")
    queue.plan(queue.tick().run_requests[0])
    assert queue.noticed() == []
    assert queue.pipeline.ledger.chunks.account(SOURCE).claimed_objects == 2  # Postgres has no NUL


def test_a_tick_with_events_lists_many_pages(pipeline, unruly_s3):
    unruly_s3.page_keys = 2
    queue = Queue(with_source(pipeline, endpoint_url=unruly_s3.endpoint))
    for number in range(9):
        queue.bucket.put(f"k{number}")
    queue.send("k0", "k4", "k7")
    (request,) = queue.tick().run_requests
    assert request.run_config["ops"][INVENTORY]["config"]["until"] == "k7"


def test_each_tick_drains_the_queue_and_plans_once_per_interval(pipeline, monkeypatch):
    queue = Queue(with_source(pipeline, watch_interval_seconds=300))
    for key in ("a", "b"):
        queue.bucket.put(key)
        queue.send(key)
        tick = queue.tick()
        if key == "a":
            queue.plan(tick.run_requests[0])
    assert (queue.left(), queue.noticed(), tick.run_requests) == (0, [b"b"], [])
    assert "300 seconds" in tick.skip_message
    monkeypatch.setattr(new_objects_tick, "time", SimpleNamespace(time=lambda: time.time() + 300))
    assert len(queue.tick().run_requests) == 1


def test_duplicate_and_late_events_plan_nothing_twice(queue):
    queue.bucket.put("k", b"1")
    queue.send("k", sequencer="0A")
    queue.plan(queue.tick().run_requests[0])
    queue.send("k", sequencer="0A")
    queue.send("k", name="ObjectRemoved:Delete", sequencer="09")
    tick = queue.tick()
    assert tick.run_requests == []
    assert "2 messages taken" in tick.skip_message
    assert queue.noticed() == []
    assert queue.pipeline.ledger.chunks.account(SOURCE).claimed_objects == 1


@pytest.mark.parametrize(
    ("sequencer", "stays"),
    [("0A", False), ("09", False), ("0B", True), ("9", True), ("", True)],
    ids=[
        "the same again",
        "an older one",
        "a later one",
        "of another length",
        "without a sequencer",
    ],
)
def test_an_event_during_a_listing_stays_unless_it_is_older(queue, sequencer, stays):
    queue.bucket.put("k", b"1")
    queue.send("k", sequencer="0A")
    queue.drain()
    snapshot = inventories.take_inventory(queue.context)
    queue.send("k", sequencer=sequencer or None)
    queue.drain()
    planning.cut_plan(queue.context, snapshot, new_archive=True)
    assert queue.noticed() == ([b"k"] if stays else [])


def test_a_busy_key_waits_since_its_last_listing(queue):
    queue.bucket.put("k", b"1")
    queue.send("k", sequencer="0A")
    queue.drain()
    with connected(queue.context.ledger.database) as connection:
        connection.execute("UPDATE noticed_keys SET noticed_at = now() - interval '3 days'")
    snapshot = inventories.take_inventory(queue.context)
    queue.send("k", sequencer="0B")
    queue.drain()
    planning.cut_plan(queue.context, snapshot, new_archive=True)
    (progress,) = queue.context.ledger.progress.of([SOURCE])
    assert progress.noticed_keys == 1
    assert snapshot.listed_at <= progress.noticed_at <= progress.at


def test_a_killed_drain_loses_no_message(queue, monkeypatch):
    monkeypatch.setattr(s3_queue, "HIDDEN_SECONDS", 0)
    queue.bucket.put("k", b"1")
    queue.send("k")

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(type(queue.queue), "delete", die)
        with pytest.raises(KeyboardInterrupt):
            queue.drain()
    assert (queue.noticed(), queue.left()) == ([b"k"], 1)
    (request,) = queue.tick().run_requests
    assert queue.left() == 0
    queue.plan(request)
    assert queue.pipeline.ledger.chunks.account(SOURCE).claimed_objects == 1


def test_the_daily_inventory_finds_objects_without_events(queue):
    queue.bucket.put("told", b"1")
    queue.bucket.put("dropped", b"2")
    queue.send("told")
    queue.plan(queue.tick().run_requests[0])
    assert queue.tick().run_requests == []
    assert queue.pipeline.ledger.chunks.account(SOURCE).claimed_objects == 1
    queue.send("told")
    queue.drain()
    queue.plan()  # what the schedule runs
    assert queue.pipeline.ledger.chunks.account(SOURCE).claimed_objects == 2
    assert queue.noticed() == []


def test_foreign_messages_are_set_apart(queue, monkeypatch):
    queue.send_text(json.dumps({"Event": "s3:TestEvent", "Bucket": queue.bucket.name}))
    queue.send_text("{ no JSON")
    queue.send("k", bucket="another-bucket")
    good = {"s3": {"bucket": {"name": queue.bucket.name}, "object": {"key": "good"}}}
    queue.send_text(json.dumps({"Records": [good, {"s3": {}}]}))
    queue.bucket.put("good", b"1")
    tick = queue.tick()
    assert len(tick.run_requests) == 1
    assert queue.left() == 0
    assert queue.noticed() == [b"good"]
    apart = queue.context.ledger.notices.messages_set_apart(SOURCE)
    reasons = sorted(row.reason for row in apart)
    assert len(set(reasons)) == 3
    assert any("JSON" in reason for reason in reasons)
    assert any(f"'{queue.bucket.name}'" in reason for reason in reasons)
    assert any("'bucket'" in reason for reason in reasons)
    assert b"{ no JSON" in [item.body for item in apart]
    assert queue.context.ledger.notices.count_noticed([SOURCE]) == {SOURCE: (1, 3)}

    monkeypatch.setattr(ledger_notices, "MOST_SET_APART", 4)
    for text in ("one", "too many"):
        queue.send_text(text)
    queue.plan(tick.run_requests[0])
    tick = queue.tick()
    assert "4 messages" in tick.skip_message
    assert "my-source`" in tick.skip_message
    assert "1 message left" in tick.skip_message
    assert queue.left() == 1
    again = QueueMessage(apart[0].message_id, "", apart[0].body, (), apart[0].reason)
    other = replace(again, message_id="other")
    assert queue.context.ledger.notices.take_messages(SOURCE, [other, again]) == {
        again.message_id
    }  # its deletion had failed


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "null",
        '"x"',
        '{"Records": []}',
        '{"Records": {"s3": 1}}',
        '{"Records": [null]}',
        '{"Type": "Notification"}',
        '{"detail-type": null}',
        "[" * 10**5,
    ]
    + [
        json.dumps(output)
        for source in ({}, {"key": 1}, {"key": "x" * 1025}, None)
        for output in (
            {"Records": [{"s3": {"bucket": {"name": "b"}, "object": source}}]},
            by_eventbridge(source),
        )
    ],
)
def test_any_message_is_parsed_without_an_exception(body):
    events, wrong = events_of(body, "b")
    assert list(events) == []
    assert wrong


@pytest.mark.parametrize("key", [*ODD_KEYS, "\0", "ü" * 512])
def test_s3_and_eventbridge_events_give_the_same_key(key):
    original = {"Records": [{"s3": {"bucket": {"name": "b"}, "object": {"key": quote_plus(key)}}}]}
    for output in (original, by_eventbridge({"key": key})):
        wrapped = {"Type": "Notification", "TopicArn": "t", "Message": json.dumps(output)}
        for body in (output, wrapped):
            assert events_of(json.dumps(body), "b") == ([ObjectEvent(key.encode(), "")], "")


@pytest.mark.parametrize(
    ("own", "bridged"),
    [
        ("ObjectCreated:Put", "Object Created"),
        ("ObjectRemoved:DeleteMarkerCreated", "Object Deleted"),
        ("LifecycleExpiration:Delete", "Object Deleted"),
        ("ObjectRestore:Post", "Object Restore Initiated"),
        ("ObjectRestore:Completed", "Object Restore Completed"),
        ("ObjectRestore:Delete", "Object Restore Expired"),
        ("LifecycleTransition", "Object Storage Class Changed"),
        ("IntelligentTiering", "Object Access Tier Changed"),
        ("ObjectAcl:Put", "Object ACL Updated"),
        ("ObjectTagging:Put", "Object Tags Added"),
        ("ObjectTagging:Delete", "Object Tags Deleted"),
    ],
)
def test_each_event_names_its_key_and_restores_are_marked(own, bridged):
    source = {"key": "k", "sequencer": "617f08299329d189"}
    expected = (
        [ObjectEvent(b"k", "617F08299329D189", restored=own == "ObjectRestore:Completed")],
        "",
    )
    record = {"eventName": own, "s3": {"bucket": {"name": "b"}, "object": source}}
    assert events_of(json.dumps({"Records": [record]}), "b") == expected
    assert events_of(json.dumps(by_eventbridge(source, bridged)), "b") == expected


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            by_eventbridge({"key": "k"}, detail={"bucket": {"name": "c"}, "object": {"key": "k"}}),
            "of another bucket than 'b'",
        ),
        (by_eventbridge({"size": 1}), "without a key"),
        (by_eventbridge({"key": "k"}, source="com.example"), "its source is not 'aws.s3'"),
        (
            by_eventbridge(None, "AWS API Call via CloudTrail", detail={"eventName": "PutObject"}),
            "without 'bucket'",
        ),
        (by_eventbridge({"key": "k"}, detail="k"), "without 'detail'"),
        (
            by_eventbridge({"key": "k"})["detail"],
            "the target of a rule must have no input transformer",
        ),
        ({"bucket": "b", "key": "k"}, "the target of a rule must have no input transformer"),
    ],
)
def test_a_foreign_eventbridge_message_has_a_reason(said, why):
    events, wrong = events_of(json.dumps(said), "b")
    assert list(events) == []
    assert wrong.endswith(why)


@pytest.mark.parametrize(
    "bucket", ["arn:aws:s3:eu-west-1:111122223333:accesspoint/ap", "ap-x1y2z3-s3alias"]
)
def test_an_access_point_source_takes_events_of_its_bucket(bucket):
    queue = open_event_queue(
        SOURCE,
        SourceSettings(bucket=bucket, queue="https://sqs.eu-west-1.amazonaws.com/1/q", region="x"),
    )
    record = {"s3": {"bucket": {"name": "b"}, "object": {"key": "k"}}}
    for output in ({"Records": [record]}, by_eventbridge({"key": "k"})):
        assert events_of(json.dumps(output), queue.bucket) == ([ObjectEvent(b"k", "")], "")
    assert events_of(json.dumps({"Event": "s3:TestEvent", "Bucket": "b"}), queue.bucket) == ((), "")


def test_an_sns_message_is_unwrapped():
    event = json.dumps({"Records": [{"s3": {"bucket": {"name": "b"}, "object": {"key": "k"}}}]})
    wrapped = [
        json.dumps({"Type": "Notification", "TopicArn": "t", "Message": held})
        for held in (event, "no JSON", "[]", 5)
    ]
    assert events_of(wrapped[0], "b") == ([ObjectEvent(b"k", "")], "")
    assert all(
        wrong and not events for events, wrong in (events_of(body, "b") for body in wrapped[1:])
    )


def test_keys_are_form_decoded_and_odd_sequencers_ignored():
    record = {
        "s3": {"bucket": {"name": "b"}, "object": {"key": "a+b%2B%FF%00", "sequencer": "no hex"}}
    }
    assert events_of(json.dumps({"Records": [record]}), "b") == (
        [ObjectEvent(b"a b+\xff\0", "")],
        "",
    )


def test_a_hanging_queue_stops_no_plan_of_noticed_keys(queue):
    queue.bucket.put("k", b"1")
    queue.send("k")
    queue.drain()
    with silent_server() as server:
        url = f"{server.url}/1/q"
        silent = with_source(queue.pipeline, queue=url)
        for _ in ("late", "late since the last tick"):
            (request,) = evaluate_tick(silent, SENSOR, tick_seconds=10).run_requests
        queue.plan(request)
        tick = evaluate_tick(silent, SENSOR, tick_seconds=10)
    assert (tick.run_requests, f"queue {url}" in tick.skip_message) == ([], True)


def test_noticed_keys_are_planned_without_the_queue(queue):
    queue.bucket.put("k", b"1")
    queue.send("k")
    queue.drain()
    queue.client.delete_queue(QueueUrl=queue.url)
    (request,) = queue.tick().run_requests
    queue.plan(request)
    with pytest.raises(SourceError, match="no queue"):
        queue.tick()

    def found():
        (progress,) = queue.context.ledger.progress.of([SOURCE])
        source = queue.pipeline.settings.sources[SOURCE]
        return [
            item.kind
            for item in find_conditions(
                progress, source, AlertSettings(), paused=False, on_jackal=False
            )
        ]

    assert found() == []
    with connected(queue.context.ledger.database) as connection:
        connection.execute("UPDATE queue_reads SET read_at = now() - interval '3 days'")
    assert found() == [ConditionKind.QUEUE_UNREAD]
    drain_queue(queue.context, queue.queue, enough=lambda: True)  # no time was left to ask it
    assert found() == [ConditionKind.QUEUE_UNREAD]
    with connected(queue.context.ledger.database) as connection:
        connection.execute("DELETE FROM queue_reads")
    assert found() == []  # of a queue that was never to be read
    with pytest.raises(SourceError):
        drain_queue(queue.context, queue.queue, enough=lambda: False)
    with connected(queue.context.ledger.database) as connection:
        connection.execute("UPDATE queue_reads SET read_at = now() - interval '3 days'")
    assert found() == [ConditionKind.QUEUE_UNREAD]  # of one that was to be read and never could be


def test_the_queue_is_read_while_a_plan_is_registered(queue):
    queue.send("k")
    with queue.context.ledger.plans._of_source(
        SOURCE, lock=Lock.NO_KEY_UPDATE
    ):  # as a plan of millions of claims does for minutes
        queue.drain()
    assert queue.noticed() == [b"k"]


def test_an_object_restored_from_cold_storage_is_planned(queue):
    queue.bucket.put("cold", b"1")
    queue.bucket.put("denied", b"2")
    queue.plan()
    reasons = {"cold": SkipReason.COLD_STORAGE, "denied": SkipReason.ACCESS_DENIED}
    with connected(queue.context.ledger.database) as connection:
        connection.execute("DELETE FROM claims")
    listed = inventories.take_inventory(queue.context, to_plan=False)
    queue.context.ledger.skips.record(
        SOURCE, [Skip.of(obj, reasons[obj.key.decode()], "") for obj in read_objects(listed.path)]
    )
    for key in reasons:
        queue.send(key)
    assert queue.tick().run_requests == []
    for key in reasons:
        queue.send(key, name="ObjectRestore:Completed")
    before = set(queue.pipeline.chunks())
    queue.plan(queue.tick().run_requests[0])
    (chunk,) = set(queue.pipeline.chunks()) - before
    assert queue.context.ledger.chunks.get(chunk).object_count == 1


@pytest.mark.parametrize("still_there", [True, False])
def test_an_object_restored_during_packing_is_planned_later(tmp_path, ledger, still_there):
    source = MemorySource(
        {"a": b"1" * 100, "b": b"2" * 100}, unavailable={"a": (SkipReason.COLD_STORAGE, 0)}
    )
    context = a_run_context(tmp_path, source, ledger)

    def look():
        result = scan_noticed(context, after=b"", max_pages=20, enough=lambda: False)
        return result and result.to_plan

    (chunk,) = plan(context).chunks
    archive_chunk(
        context, chunk.name, until=chunk_steps.pack_chunk
    )  # S3 has answered that it is cold
    ledger.notices.take_messages(
        "src", [QueueMessage("1", "r", b"", [ObjectEvent(b"a", "01", restored=True)], "")]
    )
    assert look() is False
    archive_chunk(context, chunk.name)
    assert look() is True
    if still_there:
        source.unavailable.clear()
    (chunk,) = plan(context).chunks
    archive_chunk(context, chunk.name)
    assert ledger.chunks.account("src").located_objects == 1 + still_there
    assert look() is None  # a copy that is gone again is not asked for again and again


def test_noticed_keys_are_listed_in_bounded_parts(tmp_path, ledger):
    objects = MemorySource({f"k{number:04}": b"x" for number in range(2_500)})
    context = a_run_context(tmp_path, objects, ledger)
    named = ["k0000", "k0999", "k1500", "k2499", "k9"]
    ledger.notices.take_messages(
        "src", [QueueMessage("m", "", b"", [ObjectEvent(key.encode(), "") for key in named], "")]
    )

    def look(after, max_pages):
        result = scan_noticed(context, after=after, max_pages=max_pages, enough=lambda: False)
        return result and (result.to_plan, result.until)

    assert look(b"", 1) == (
        True,
        b"k0000",
    )  # of k0999, which ends the page, the next page might have more
    assert look(b"k0000", 1) == (True, b"k1500")
    assert look(b"k1500", 20) == (True, b"k9")  # k9 is gone
    planning.cut_plan(
        context,
        inventories.take_inventory(context, after=just_before(b"k0000"), until=b"k1500"),
        new_archive=True,
    )
    assert ledger.notices.noticed_keys("src", b"", 9) == [b"k2499", b"k9"]
    assert look(b"k9", 20) == (True, b"k9")  # again from the first
    planning.cut_plan(
        context, inventories.take_inventory(context, after=just_before(b"k2499")), new_archive=True
    )
    assert look(b"", 20) is None
