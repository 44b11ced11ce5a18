"""`caf metrics` matches the ledger, and the dashboard uses only these metrics."""

import json
import re
import signal
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from caf_pipeline.cli.metrics import render
from caf_pipeline_tests.support.chunk_rows import set_state
from caf_pipeline_tests.support.command_line import KEYS, CommandLine, archive_source, source_text
from caf_pipeline_tests.support.postgres import connected

ROOT = Path(__file__).parents[2]


@pytest.fixture
def caf(tmp_path, database_url, s3_server, new_bucket):
    for number in range(3):
        new_bucket.put(f"k{number}", bytes(700_000))  # one chunk for each object
    caf = CommandLine(tmp_path, KEYS | {"CAF_DATABASE_URL": database_url})
    caf.settings(source_text(s3_server, new_bucket.name))
    archive_source(caf)
    return caf


def samples(page: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a page of OpenMetrics, by name and labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_metrics_match_the_ledger(caf, ledger):
    with connected(ledger.database) as connection:
        first = "(SELECT min(caf_file_id) FROM caf_files)"
        set_state(connection, "packing", f"caf_file_id = {first}")
        connection.execute(f"UPDATE caf_files SET attempts = 4 WHERE caf_file_id = {first}")
        last = "(SELECT max(caf_file_id) FROM caf_files)"
        looked_at = "suspected_at = now(), checked_at = to_timestamp(2000)"
        connection.execute(f"UPDATE chunk_copies SET {looked_at} WHERE caf_file_id = {last}")
        connection.execute(
            "INSERT INTO chain_listings VALUES ('jackal', now(), to_timestamp(1000)), ('other', "
            "now(), "
            "NULL)"
        )
    ledger.controls.set("paused", "a test")
    exported = samples(caf("metrics").out.decode())
    assert exported["caf_chunks", "src", "located"] == 2
    assert exported["caf_chunks", "src", "packing"] == 1
    assert exported["caf_object_bytes", "src", "located"] == 1_400_000
    assert exported["caf_objects", "src", "packing"] == 1
    assert exported["caf_packing_attempts_total", "src"] == 6
    assert exported["caf_skipped_objects", "src"] == 0
    assert exported["caf_paused",] == 1
    (progress,) = ledger.progress.of(["src"])
    assert exported["caf_oldest_pending_timestamp_seconds", "src"] == pytest.approx(
        progress.oldest_planned_at.timestamp()
    )
    assert exported["caf_last_inventory_timestamp_seconds", "src"] == pytest.approx(
        progress.inventory_at.timestamp()
    )
    assert sum(value for name, value in exported.items() if name[:2] == ("caf_copies", "src")) == 2
    assert exported["caf_suspected_chunks", "src"] == 1
    assert exported["caf_last_look_timestamp_seconds", "src"] == 2000
    assert {name: value for name, value in exported.items() if "bulk_look" in name[0]} == {
        ("caf_last_whole_bulk_look_timestamp_seconds", "jackal"): 1000
    }


def test_the_bought_space_and_the_balance_are_exported(caf, ledger):
    read_at = datetime.fromtimestamp(1_800_000_000, UTC)
    plan = (2_000, 500, read_at + timedelta(days=40))
    ledger.storage_plans.record(
        "jackal-1/rich",
        read_at=read_at,
        balance=7,
        plan=plan,
        starts_at=read_at - timedelta(days=5),
    )
    ledger.storage_plans.record("jackal-1/poor", read_at=read_at, balance=0, plan=None)
    exported = samples(caf("metrics").out.decode())
    assert {
        name: value for name, value in exported.items() if name[0].startswith("caf_jackal_")
    } == {
        ("caf_jackal_plan_end_timestamp_seconds", "jackal-1/rich"): 1_800_000_000 + 40 * 86_400,
        ("caf_jackal_space_warning_timestamp_seconds", "jackal-1/rich"): 1_800_000_000
        + 25 * 86_400,
        ("caf_jackal_space_bytes", "jackal-1/rich"): 2_000,
        ("caf_jackal_used_bytes", "jackal-1/rich"): 500,
        ("caf_jackal_balance_ujkl", "jackal-1/rich"): 7,
        ("caf_jackal_balance_ujkl", "jackal-1/poor"): 0,
        ("caf_jackal_plan_read_timestamp_seconds", "jackal-1/rich"): 1_800_000_000,
        ("caf_jackal_plan_read_timestamp_seconds", "jackal-1/poor"): 1_800_000_000,
    }


@pytest.mark.thorough
def test_metrics_answer_503_while_the_database_is_away(caf, ledger):
    serving = caf.start("metrics", "--serve", "127.0.0.1:0")
    address = re.search(rb"http://\S+", serving.stderr.readline())[0].decode()
    scrape = urllib.request.Request(
        address, headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(scrape) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert samples(answer.read().decode()) == samples(caf("metrics").out.decode())
    with connected(ledger.database) as connection:
        connection.execute("ALTER TABLE sources RENAME TO hidden")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(address)
    with connected(ledger.database) as connection:
        connection.execute("ALTER TABLE hidden RENAME TO sources")
    with urllib.request.urlopen(address) as answer:
        assert answer.status == 200
    serving.send_signal(signal.SIGINT)
    _, output = serving.communicate()
    assert (serving.returncode, output.count(b"\n")) == (130, 1)


@pytest.mark.thorough
def test_metrics_are_served_by_ipv6(caf):
    serving = caf.start("metrics", "--serve", "[::1]:0")
    address = re.search(rb"http://\[::1\]:\S+", serving.stderr.readline())[0].decode()
    with urllib.request.urlopen(address) as answer:
        assert answer.status == 200
    serving.kill()
    serving.communicate()


def test_the_documented_rules_use_only_existing_metrics(caf, ledger):
    with connected(ledger.database) as connection:
        connection.execute("UPDATE chunk_copies SET checked_at = now()")
        connection.execute("INSERT INTO chain_listings VALUES ('jackal', now(), now())")
        first = "(SELECT min(caf_file_id) FROM caf_files)"
        set_state(connection, "packing", f"caf_file_id = {first}")
    now = datetime.now(UTC)
    ledger.storage_plans.record("jackal-1/a", read_at=now, balance=7, plan=(2_000, 500, now))
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    rules = [
        rule
        for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
        for rule in yaml.safe_load(block)
        if "alert" in rule
    ]
    named = set(re.findall(r"caf_\w+", " ".join(rule["expr"] for rule in rules)))
    assert {"caf_jackal_space_warning_timestamp_seconds", "caf_chunks"} <= named
    assert named <= {name[0] for name in samples(render(ledger, 30).decode())}


def test_the_dashboard_uses_only_existing_metrics_and_states(caf, ledger):
    absent = {
        "caf_oldest_pending_timestamp_seconds",
        "caf_last_look_timestamp_seconds",
        "caf_last_whole_bulk_look_timestamp_seconds",
    }
    there = {name[0] for name in samples(render(ledger, 30).decode())} | absent
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "caf-pipeline.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [
        variable["query"]["query"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    named = set(re.findall(r"caf_\w+", " ".join(queries)))
    assert named == there
    from caf_pipeline.chunk_state import ChunkState

    states = {
        state
        for several in re.findall(r'state=~?"([^"]+)"', " ".join(queries))
        for state in several.split("|")
    }
    assert states <= set(ChunkState)
