"""`caf plan` and `caf plans`."""

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from caf_pipeline.cli import plans
from caf_pipeline.errors import NotLocated
from caf_pipeline.inventory.plan import OBJECTS_FILE, PLAN_SCHEMA
from caf_pipeline.source.protocol import ObjectEvent, QueueMessage
from caf_pipeline.steps import inventories
from caf_pipeline.steps.preview import preview_plan
from caf_pipeline_tests.support.command_line import (
    KEYS,
    CommandLine,
    archive_source,
    opened_context,
    source_text,
)
from caf_pipeline_tests.support.inventory_reports import ReportWriter
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import a_run_context, plan
from caf_pipeline_tests.support.s3_server import make_bucket

pytestmark = pytest.mark.thorough


@pytest.fixture
def caf(tmp_path, database_url, s3_server, new_bucket):
    """A command line whose source has 26 objects."""
    for number in range(25):
        new_bucket.put(f"some/key-{number:02d}", os.urandom(100_000))
    new_bucket.put("empty", b"")
    command_line = CommandLine(tmp_path, KEYS | {"CAF_DATABASE_URL": database_url})
    command_line.settings(source_text(s3_server, new_bucket.name))
    return command_line


def test_a_preview_shows_the_plan_and_plans_nothing(caf):
    done = caf("plan", "src", "--dry-run")
    assert done.status == 0, done.err
    text = done.out.decode()
    assert "planned   26 objects, 2.4 MiB" in text
    assert "chunks    3 of 1.0 MiB, filled by 95.4% with objects" in text
    assert "set get_price" in text
    assert "time      not known" in text
    assert "class     STANDARD: 26 objects, 2.4 MiB" in text
    assert "█" in text
    assert b"nothing planned yet" in caf("plans", "src").out


def test_a_preview_as_json_has_every_number(caf):
    report = json.loads(caf("plan", "src", "--dry-run", "--json").out)
    assert (report["objects"], report["bytes"], report["chunks"], report["located"]) == (
        26,
        2_500_000,
        3,
        0,
    )
    assert (report["requests"], report["request_usd"], report["seconds"], report["last_plan"]) == (
        26,
        None,
        None,
        None,
    )
    assert report["smallest"][0] == {"key": "empty", "bytes": 0}
    assert sum(step["objects"] for step in report["sizes"]) == 26
    again = json.loads(caf("plan", "src", "--dry-run", "--json", "--last-inventory").out)
    assert again == report


@pytest.mark.parametrize(
    "endpoint", [{"endpoint_url": "http://s3.example.org"}, {}], ids=["elsewhere", "at AWS"]
)
@pytest.mark.parametrize("prices", [{"get_price": 5}, {"get_price": 5, "egress_price": 1024}])
def test_a_preview_names_aws_only_without_an_endpoint(tmp_path, ledger, capsys, endpoint, prices):
    described = {"bucket": "b", "public": True, **endpoint, **prices}
    context = a_run_context(
        tmp_path, MemorySource({"k": b"x" * 100}), ledger, sources={"src": described}
    )
    plans._print_preview(preview_plan(context, inventories.take_inventory(context)), public=True)
    text = capsys.readouterr().out
    assert ("bucket’s region" in text, "AWS's list prices" in text) == (not endpoint, not endpoint)


def test_a_preview_names_the_report_and_its_age(caf, s3_server, new_bucket):
    reports = ReportWriter(new_bucket.client, new_bucket.name, make_bucket(s3_server).name)
    now = datetime.now(UTC).replace(microsecond=0)
    first, second = (
        f"{reports.folder}{reports.write(now - timedelta(days=days))}/" for days in (30, 3)
    )
    caf.settings(source_text(s3_server, new_bucket.name) + f'inventory = "{reports.folder}"\n')
    done = caf("plan", "src", "--dry-run")
    assert (done.status, done.err) == (0, "")
    assert (
        f"report    {second}, of {now - timedelta(days=3):%Y-%m-%d %H:%M:%S} UTC, 3.0 days old"
        in done.out.decode()
    )
    done = caf(
        "plan", "src", "--dry-run", "--json", "--report", f"{now - timedelta(days=30):%Y-%m-%d}"
    )
    report = json.loads(done.out)
    assert (report["report"], report["inventory_taken_at"]) == (
        first,
        (now - timedelta(days=30)).isoformat(),
    )
    assert "is 30 days old" in done.err


def test_the_option_dry_run_has_no_effect(caf):
    done = caf("plan", "src")
    assert (done.status, done.out) == (0, caf("plan", "src", "--dry-run", "--last-inventory").out)
    assert b"Nothing was planned" in done.out


def test_the_inventory_of_another_prefix_is_not_used(caf, s3_server, new_bucket):
    assert caf("plan", "src", "--dry-run").status == 0
    caf.settings(source_text(s3_server, new_bucket.name) + 'prefix = "some/"\n')
    done = caf("plan", "src", "--dry-run", "--last-inventory")
    assert (done.status, done.out) == (11, b"")
    with opened_context(caf) as context:
        with pytest.raises(NotLocated, match="'src'"):
            inventories.snapshot_to_plan(context)
        assert inventories.take_inventory(context).object_count == 25
        assert inventories.snapshot_to_plan(context).object_count == 25


def test_an_inventory_of_another_setting_of_versions_is_not_planned(caf, s3_server, new_bucket):
    new_bucket.keep_versions()
    for content in (b"older", b"newer"):
        new_bucket.put("some/key-00", content)
    assert caf("plan", "src", "--dry-run").status == 0
    caf.settings(source_text(s3_server, new_bucket.name, versions="all"))
    done = caf("plan", "src", "--dry-run", "--last-inventory")
    assert (done.status, done.out) == (11, b"")
    for fact in ('versions = "current"', "sources.src.versions", "--last-inventory"):
        assert fact in done.err
    with opened_context(caf) as context:
        with pytest.raises(NotLocated, match='versions = "current"'):
            inventories.snapshot_to_plan(context)
        listed = inventories.take_inventory(context).object_count
        assert inventories.snapshot_to_plan(context).object_count == listed
    assert (
        json.loads(caf("plan", "src", "--dry-run", "--last-inventory", "--json").out)["objects"]
        == listed
    )


def test_a_preview_warns_if_the_prefix_changed(caf, s3_server, new_bucket):
    archive_source(caf)
    assert b"refused" not in caf("plan", "src", "--dry-run").out
    caf.settings(source_text(s3_server, new_bucket.name) + 'prefix = "some/"\n')
    text = " ".join(caf("plan", "src", "--dry-run").out.decode().split())
    assert "refused: source 'src'" in text
    assert text.count(f"/{new_bucket.name}/some/") == 1


def test_a_preview_keeps_noticed_keys_in_the_ledger(caf):
    archive_source(caf)
    with opened_context(caf) as context:
        ledger = context.ledger
        ledger.notices.take_messages(
            "src", [QueueMessage("1", "receipt", b"", [ObjectEvent(b"empty", "1")], "")]
        )
        ledger.notices.mark_noticed("src", "a-listing-under-way", b"", None)
        assert caf("plan", "src", "--dry-run").status == 0
        assert list(ledger.notices.noticed_keys("src", b"", 5)) == [b"empty"]
        ledger.notices.forget_noticed(
            "src", "a-listing-under-way", context.objects.clock(), b"", None
        )
        assert not ledger.notices.noticed_keys("src", b"", 5)


def test_plans_are_listed_and_shown_with_their_chunks_and_objects(caf):
    archive_source(caf)
    (row,) = [json.loads(line) for line in caf("plans", "src", "--json").out.splitlines()]
    assert (row["source"], row["objects"], row["bytes"], row["chunks"]) == (
        "src",
        26,
        2_500_000,
        {"located": 3},
    )
    assert row["plan"] in caf("plans", "src").out.decode()
    shown = json.loads(caf("plans", "show", row["plan"], "--json").out)
    assert [chunk["state"] for chunk in shown["chunk_list"]] == ["located"] * 3
    assert (
        sum(chunk["objects"] for chunk in shown["chunk_list"])
        == sum(step["objects"] for step in shown["sizes"])
        == 26
    )
    text = caf("plans", "show", f"src-{row['plan']}").out.decode()
    assert f"src-{row['plan']}-00003  located" in text
    preview = caf("plan", "src", "--dry-run").out.decode()
    assert f"last plan {row['plan']} of " in preview
    assert "-26 objects" not in preview


def test_a_chunk_is_shown_with_its_keys_and_state(caf):
    archive_source(caf)
    (row,) = [json.loads(line) for line in caf("plans", "src", "--json").out.splitlines()]
    chunk = f"src-{row['plan']}-00001"
    shown = json.loads(caf("plans", "chunk", chunk, "--json").out)
    assert (shown["state"], shown["number"], shown["first_key"], shown["last_key"]) == (
        "located",
        1,
        "empty",
        "some/key-09",
    )
    assert (shown["objects"], shown["members"], shown["released"]) == (11, 11, 0)
    assert "keys      empty … some/key-09" in caf("plans", "chunk", chunk).out.decode()
    shutil.rmtree(row["folder"])  # as after `caf rebuild`, or on another machine
    plan, text = caf("plans", "show", row["plan"]), caf("plans", "chunk", chunk)
    assert (plan.status, text.status) == (0, 0), plan.err + text.err
    assert row["folder"] in plan.out.decode()
    assert f"{chunk}  located" in plan.out.decode()
    assert "state     located" in text.out.decode()
    shown = json.loads(caf("plans", "chunk", chunk, "--json").out)
    assert (shown["state"], shown["first_key"], len(shown["merkle_root"])) == ("located", None, 64)
    assert json.loads(caf("plans", "show", row["plan"], "--json").out)["objects"] == 26


def test_a_plan_with_a_flipped_bit_is_not_shown(caf, new_bucket):
    for number in range(20):
        new_bucket.put(f"sizes/{number}", bytes(1237 * number))
    with opened_context(caf) as context:
        (made,) = plan(context).plans
    assert caf("plans", "show", made.name).status == 0
    path = Path(made.folder) / OBJECTS_FILE
    sizes = pq.read_metadata(path).row_group(0).column(PLAN_SCHEMA.get_field_index("size_bytes"))
    content = bytearray(path.read_bytes())
    content[sizes.data_page_offset + sizes.total_compressed_size * 2 // 3] ^= 1
    path.write_bytes(content)
    for more in ((), ("--json",)):
        shown = caf("plans", "show", made.name, *more)
        assert (shown.status, shown.out) == (1, b"")
        assert f"the plan's file {path} cannot be read: " in shown.err
