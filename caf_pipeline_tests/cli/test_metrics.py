"""`caf metrics` matches the ledger, and the dashboard uses only these metrics."""

import json
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest
import yaml
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

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


@pytest.fixture(scope="module")
def promtool():
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed; `.ci/run` installs it")

    def run(*arguments, **options):
        done = subprocess.run(
            [program, *arguments], check=False, capture_output=True, text=True, **options
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout

    return run


def samples(page: str, parse=text_string_to_metric_families) -> dict[tuple[str, ...], float]:
    """Return the samples of a page in Prometheus' text format, by name and labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in parse(page)
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
        page = answer.read().decode()
        assert samples(page, openmetrics.text_string_to_metric_families) == samples(
            caf("metrics").out.decode()
        )
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


def test_promtool_accepts_the_printed_metrics(caf, promtool):
    promtool("check", "metrics", input=caf("metrics").out.decode())


def rule_files() -> list[str]:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    return [
        block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "alert:" in block
    ]


def documented_rules() -> list[dict[str, str]]:
    return [
        rule
        for text in rule_files()
        for group in yaml.safe_load(text)["groups"]
        for rule in group["rules"]
    ]


def test_the_documented_rules_use_only_existing_metrics(caf, ledger):
    with connected(ledger.database) as connection:
        connection.execute("UPDATE chunk_copies SET checked_at = now()")
        connection.execute("INSERT INTO chain_listings VALUES ('jackal', now(), now())")
        first = "(SELECT min(caf_file_id) FROM caf_files)"
        set_state(connection, "packing", f"caf_file_id = {first}")
    now = datetime.now(UTC)
    ledger.storage_plans.record("jackal-1/a", read_at=now, balance=7, plan=(2_000, 500, now))
    named = set(re.findall(r"caf_\w+", " ".join(rule["expr"] for rule in documented_rules())))
    assert {"caf_jackal_space_warning_timestamp_seconds", "caf_chunks"} <= named
    assert named <= {name[0] for name in samples(render(ledger, 30).decode())}


HOUR: Final = 3_600
DAY: Final = 24 * HOUR
NOW: Final = 10 * DAY
"""Seconds from the beginning of a test by promtool to its alerts."""

INVENTORY: Final = 'caf_last_inventory_timestamp_seconds{source="src"}'
PENDING: Final = 'caf_oldest_pending_timestamp_seconds{source="src"}'
CHANGE: Final = 'caf_last_change_timestamp_seconds{source="src"}'
LOOK: Final = 'caf_last_look_timestamp_seconds{source="src"}'
LISTS: Final = 'caf_last_whole_bulk_look_timestamp_seconds{store="jackal"}'
LOCATED: Final = 'caf_chunks{source="src",state="located"}'
DAMAGED: Final = 'caf_chunks{source="src",state="damaged"}'
PARKED: Final = 'caf_chunks{source="src",state="parked"}'
SKIPPED: Final = 'caf_skipped_objects{source="src"}'
FILE: Final = 'node_textfile_mtime_seconds{file="/var/lib/node_exporter/caf.prom"}'
WARNING: Final = 'caf_jackal_space_warning_timestamp_seconds{account="new"}'
READ, READ_BEFORE = (
    f'caf_jackal_plan_read_timestamp_seconds{{account="{account}"}}' for account in ("new", "old")
)
PAUSED: Final = "caf_paused{}"

# Two ledgers with the same names. The alert fires for the first alone, with the labels of its first
# series.
CASES: Final[list[tuple[str, dict[str, int], dict[str, int]]]] = [
    ("CafAway", {'up{job="caf"}': 0}, {'up{job="caf"}': 1}),
    ("CafAway", {FILE: NOW - DAY}, {FILE: NOW - 60}),
    ("CafNoInventory", {INVENTORY: NOW - 5 * DAY}, {INVENTORY: NOW - DAY}),
    ("CafNoInventory", {INVENTORY: NOW + 5 * DAY}, {INVENTORY: NOW + DAY}),
    ("CafNeverListed", {SKIPPED: 0}, {SKIPPED: 0, INVENTORY: NOW - 5 * DAY}),
    (
        "CafStalled",
        {PENDING: NOW - 7 * HOUR, CHANGE: NOW - 7 * HOUR},
        {PENDING: NOW - 7 * HOUR, CHANGE: NOW - HOUR},
    ),
    ("CafStalled", {PENDING: NOW - 7 * HOUR}, {PENDING: NOW - HOUR, CHANGE: NOW - DAY}),
    ("CafStalled", {PENDING: NOW - 7 * HOUR}, {CHANGE: NOW - DAY}),
    ("CafDamaged", {DAMAGED: 1}, {DAMAGED: 0, LOCATED: 1}),
    ("CafParked", {PARKED: 1}, {PARKED: 0, LOCATED: 1}),
    ("CafUnwatched", {LOOK: NOW - 3 * DAY}, {LOOK: NOW - DAY}),
    ("CafNeverWatched", {LOCATED: 1}, {LOCATED: 1, LOOK: NOW - 3 * DAY}),
    ("CafListsNotRead", {LISTS: NOW - 7 * HOUR}, {LISTS: NOW - HOUR}),
    ("CafSpaceEnds", {WARNING: NOW - HOUR}, {WARNING: NOW + HOUR}),
    (
        "CafSpaceNotRead",
        {PAUSED: 0, READ: NOW - 3 * DAY, READ_BEFORE: NOW - 9 * DAY},
        {PAUSED: 0, READ: NOW - DAY, READ_BEFORE: NOW - 9 * DAY},
    ),
    ("CafSpaceNotRead", {PAUSED: 0}, {PAUSED: 0, READ: NOW - DAY}),
]


def promtool_case(alert: str, firing: dict[str, int], silent: dict[str, int]) -> dict[str, object]:
    labels = dict(re.findall(r'(\w+)="(.*?)"', next(iter(firing))))
    return {
        "name": alert,
        "interval": "6h",
        "input_series": [
            {
                "series": series.replace("{", f'{{instance="{instance}",').replace(",}", "}"),
                "values": f"{value}x{NOW // (6 * HOUR)}",
            }
            for instance, ledger in (("firing", firing), ("silent", silent))
            for series, value in ledger.items()
        ],
        "alert_rule_test": [
            {
                "eval_time": f"{NOW}s",
                "alertname": alert,
                "exp_alerts": [{"exp_labels": labels | {"instance": "firing"}}],
            }
        ],
    }


def test_each_alert_rule_fires_for_its_ledger_alone(tmp_path, promtool):
    assert {alert for alert, _, _ in CASES} == {rule["alert"] for rule in documented_rules()}
    names = []
    for number, text in enumerate(rule_files()):
        (tmp_path / f"{number}.yml").write_text(text)
        names.append(f"{number}.yml")
    cases = {
        "rule_files": names,
        "evaluation_interval": "6h",
        "tests": [promtool_case(*case) for case in CASES],
    }
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))
    promtool("check", "rules", *names, cwd=tmp_path)
    promtool("test", "rules", "cases.yml", cwd=tmp_path)


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
