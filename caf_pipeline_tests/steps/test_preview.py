"""Previews match the plans that are made afterwards."""

import os
from dataclasses import replace

import pytest

from caf_pipeline.caf.archive import Limits
from caf_pipeline.errors import NotPublic, StoreUnreachable
from caf_pipeline.formats import age
from caf_pipeline.inventory import cutting
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.records import Skip
from caf_pipeline.packing.journal import writer
from caf_pipeline.settings import EncryptionSettings, SourceSettings
from caf_pipeline.steps import chunk_steps, inventories, planning, preview
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline.store.protocol import StorageCost
from caf_pipeline.wiring import open_run_context
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    archive_chunk,
    archive_everything,
    first_chunk,
    plan,
)


@pytest.fixture
def source():
    return MemorySource(
        {f"key-{number:03d}": os.urandom(40_000) for number in range(30)} | {"empty": b""}
    )


@pytest.fixture
def context(tmp_path, source, ledger):
    return a_run_context(tmp_path, source, ledger)


def previewed(context):
    return preview.preview_plan(context, inventories.take_inventory(context, to_plan=False))


def test_preview_has_same_chunks_and_objects_as_plan(context):
    result = previewed(context)
    made = plan(context)
    assert result.estimate.chunks == len(made.chunks) > 1
    assert result.estimate.statistics == preview.estimate_report(context, made).statistics
    assert result.estimate.statistics.objects == made.plan.object_count == 31
    assert result.estimate.expected_bytes == sum(chunk.expected_size_bytes for chunk in made.chunks)
    assert result.estimate.fill == made.chunks[0].object_bytes / (1 << 20)


def test_preview_of_unknown_source_leaves_it_unknown(context, ledger):
    other = open_run_context(
        context.settings.model_copy(update={"sources": {"new": context.source_settings}}),
        "new",
        run="a preview",
        ledger=ledger,
        objects=context.objects,
        register=False,
    )
    assert previewed(other).estimate.statistics.objects == 31
    assert ledger.lookup.sources() == ["src"]


def test_preview_claims_nothing_and_leaves_only_inventory(context):
    first, second = previewed(context), previewed(context)
    assert (second.claimed, second.previous) == (0, None)
    assert first.estimate == second.estimate
    assert context.ledger.plans.list("src") == []
    assert context.ledger.chunks.account("src").claimed_objects == 0
    assert list(context.plans().iterdir()) == []


@pytest.mark.parametrize(
    "error", [NotPublic("it is not public", hint="make it so"), StoreUnreachable("away"), None]
)
def test_preview_reports_why_store_would_refuse_chunks(tmp_path, source, ledger, error):
    class Asked(DirectoryStore):
        def admit(self, **given):
            requests.append(given)
            if error:
                raise error

    requests = []
    context = a_run_context(tmp_path, source, ledger, store=Asked(tmp_path / "store"))
    result = previewed(context)
    largest = requests[0]["stored_size_bytes"]
    assert requests == [
        {
            "stored_size_bytes": largest,
            "waiting_bytes": result.estimate.expected_bytes - largest,
        }
    ]
    refused = error is not None and error.permanent
    assert result.warning.endswith("it is not public; make it so") is refused
    plan(context)
    source.bodies["new"] = b"new"
    previewed(context)
    total = sum(chunk.expected_size_bytes for chunk in ledger.chunks.list("src"))
    assert requests[-1]["waiting_bytes"] == total


def with_recipients(context, *recipients):
    encryption = EncryptionSettings(recipients=recipients)
    settings = context.settings.model_copy(update={"encryption": encryption})
    return replace(context, settings=settings)


def test_preview_warns_of_missing_and_single_recipients(tmp_path, source, ledger):
    context = a_run_context(tmp_path, source, ledger, public=False)
    first, second = (str(age.new_identity().recipient) for _ in range(2))
    assert "'caf keys new'" in previewed(context).warning
    assert "'caf keys new --recovery'" in previewed(with_recipients(context, first)).warning
    assert previewed(with_recipients(context, first, second)).warning == ""


def test_what_is_archived_claimed_and_skipped_is_told_apart(context, source):
    done = first_chunk(context)
    archive_chunk(context, done)
    members = context.ledger.chunks.get(done).member_count
    source.bodies["denied"] = b"x"
    context.ledger.skips.record(
        "src", [Skip.of(source.object("denied"), SkipReason.ACCESS_DENIED, "not yet")]
    )
    source.bodies["new"] = b"new"
    source.bodies["bad\x00key"] = b"x"
    result = previewed(context)
    assert (result.located, result.claimed, result.estimate.statistics.objects) == (
        members,
        31 - members,
        1,
    )
    assert result.skipped == {"access_denied": 1, "unsupported_key": 1}
    last = result.difference
    assert (last.plan, last.objects, last.chunks) == (
        result.previous.record.name,
        1 - 31,
        result.estimate.chunks - 2,
    )


@pytest.mark.parametrize(
    ("key", "reason"), [("bad\x00key", "unsupported_key"), ("huge", "too_large")]
)
def test_returning_object_that_is_skipped_counts_once(context, source, monkeypatch, key, reason):
    terms = planning.plan_terms
    monkeypatch.setattr(
        planning,
        "plan_terms",
        lambda *args: replace(terms(*args), limits=Limits(max_bytes=1 << 21)),
    )
    monkeypatch.setattr(cutting, "MAX_CHUNKS", 2)
    source.bodies[key] = os.urandom(5 << 20)
    plan(context)
    body = source.bodies.pop(key)
    plan(context)
    source.bodies[key] = body
    inventory = inventories.take_inventory(context)
    result = preview.preview_plan(context, inventory)
    planning.cut_plan(context, inventory)
    assert result.skipped == planning.account_for(context, inventory).skipped == {reason: 1}


def test_archiving_since_inventory_does_not_change_its_preview(context, source):
    archive_everything(context)
    source.bodies["new"] = b"new"
    earlier = inventories.take_inventory(context)
    source.bodies["key-000"] = b"another content"
    source.bodies["later"] = b"later"
    archive_everything(context)
    result, account = preview.preview_plan(context, earlier), planning.account_for(context, earlier)
    assert (account.objects, account.located) == (32, 32)
    assert (result.located, result.claimed, result.estimate.statistics.objects) == (
        account.located,
        account.claimed,
        0,
    )


def test_many_chunks_are_previewed_as_several_plans(context, source, monkeypatch):
    monkeypatch.setattr(preview, "MAX_CHUNKS", 1)
    monkeypatch.setattr(cutting, "MAX_CHUNKS", 1)
    result = previewed(context)
    made = plan(context)
    assert result.plans == len(made.plans) == result.estimate.chunks == 2


class SlowStore(DirectoryStore):
    """A store with a measured limit of bytes."""

    fitting = None

    def largest_chunk_bytes(self):
        return self.fitting


def test_smaller_chunks_for_slow_store_define_fill(tmp_path, source, ledger):
    store = SlowStore(tmp_path / "store")
    context = a_run_context(tmp_path, source, ledger, store=store)
    for chunk in plan(context).chunks:
        chunk_steps.withdraw(context, chunk.name)
    store.fitting = 1 << 18
    result = previewed(context).estimate
    made = preview.estimate_report(context, plan(context))
    assert (result.target_bytes, made.target_bytes) == (1 << 18, 1 << 18)
    assert result.fill == made.fill > 0.7


@pytest.mark.thorough
def test_the_time_is_known_once_enough_chunks_were_archived(tmp_path, source, ledger):
    context = a_run_context(tmp_path, source, ledger, target="256KiB")
    assert previewed(context).estimate.seconds is None
    archive_everything(context)
    source.bodies["more"] = os.urandom(1000)
    estimate = previewed(context).estimate
    assert estimate.rate.chunks == len(ledger.chunks.list("src")) - 1
    assert estimate.seconds == 1000 / estimate.rate.bytes_per_second > 0


def test_pauses_without_plans_do_not_lower_measured_rate(context, source):
    """One chunk a day, which takes twenty minutes from plan to location."""
    for day in range(5):
        source.bodies = {f"day-{day}": os.urandom(12_000)}
        (name,) = archive_everything(context)
        with connected(context.ledger.database) as connection:
            connection.execute(
                "UPDATE caf_files SET created_at = created_at + make_interval(days => %(day)s),"
                " located_at = created_at + make_interval(days => %(day)s, mins => 20) WHERE name "
                "= %(name)s",
                {"day": day, "name": name},
            )
    rate = previewed(context).estimate.rate
    assert (rate.chunks, rate.bytes_per_second) == (4, 10)


def test_requests_and_egress_have_list_prices_only_at_aws():
    assert preview.prices(SourceSettings(bucket="b")) == (0.0004, 0.09)
    other = {"bucket": "b", "endpoint_url": "http://s3.example.org"}
    assert preview.prices(SourceSettings(**other)) == (None, None)
    assert preview.prices(SourceSettings(**other, get_price=0.01, egress_price=0)) == (0.01, 0)
    assert preview.prices(SourceSettings(bucket="b", egress_price=0)) == (0.0004, 0)


def test_requests_cost_per_thousand_and_egress_per_gib(tmp_path, source, ledger):
    described = {"bucket": "b", "target_size": "1MiB", "get_price": 5, "egress_price": 1024}
    estimate = previewed(
        a_run_context(tmp_path, source, ledger, sources={"src": described})
    ).estimate
    assert (estimate.requests, estimate.request_usd) == (31, pytest.approx(0.155))
    assert estimate.egress_usd == pytest.approx(1_200_000 / (1 << 20))


def test_capped_part_size_raises_number_of_requests(tmp_path, source, ledger, monkeypatch):
    monkeypatch.setattr(writer, "MAX_PART_BYTES", 65_536)
    source.bodies |= {"exact": os.urandom(131_072), "one byte more": os.urandom(131_073)}
    packing = {"part_size": "128KiB", "window_size": "1MiB", "max_requests": 4}
    context = a_run_context(tmp_path, source, ledger, packing=packing)
    result = previewed(context)
    archive_everything(context)
    assert result.estimate.requests == len(source.reads) == 31 + 2 + 3


class PricedStore(DirectoryStore):
    """A store that charges a coin per byte, or does not answer."""

    answers = True

    def cost(self, stored_size_bytes, chunks, days=0):
        if not self.answers:
            raise StoreUnreachable("no node answers")
        return StorageCost(3, 3 * stored_size_bytes, 30, 3 * stored_size_bytes, chunks)


def test_preview_has_storage_price_or_goes_on_without(tmp_path, source, ledger):
    store = PricedStore(tmp_path / "store")
    context = a_run_context(tmp_path, source, ledger, store=store)
    estimate = previewed(context).estimate
    assert estimate.storage == StorageCost(
        3, 3 * estimate.expected_bytes, 30, 3 * estimate.expected_bytes, 2
    )
    store.answers = False
    result = previewed(context)
    assert (result.estimate.storage, result.archive) == (None, None)
    assert result.estimate.storage_unknown == "no node answers"


@pytest.mark.parametrize("until", [chunk_steps.pack_chunk, None])
def test_archive_costs_what_the_source_has_and_the_plan(tmp_path, source, ledger, until):
    context = a_run_context(tmp_path, source, ledger, store=PricedStore(tmp_path / "store"))
    result = previewed(context)
    assert result.archive == replace(result.estimate.storage, fees_ujkl=0)
    archive_chunk(context, first_chunk(context), until=until)
    source.bodies["new"] = os.urandom(40_000)
    result = previewed(context)
    others = sum(
        chunk.stored_size_bytes or chunk.expected_size_bytes for chunk in ledger.chunks.list("src")
    )
    assert result.estimate.statistics.objects == 1
    assert result.archive.charged_bytes == 3 * (others + result.estimate.expected_bytes)


def test_a_store_that_charges_nothing_has_no_cost(context):
    result = previewed(context)
    assert (result.estimate.storage, result.archive) == (None, None)
    assert result.estimate.storage_unknown == ""


def test_waiting_tail_is_no_part_of_estimate(tmp_path, source, ledger):
    described = {
        "bucket": "b",
        "target_size": "1MiB",
        "min_chunk_size": "512KiB",
        "max_wait": "3660d",
    }
    result = previewed(a_run_context(tmp_path, source, ledger, sources={"src": described}))
    assert (
        result.waiting.objects + result.estimate.statistics.objects,
        result.estimate.chunks,
    ) == (
        31,
        1,
    )
    assert result.claimed == 0
    assert result.as_json()["waiting"]["objects"] == result.waiting.objects
