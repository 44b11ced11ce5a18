"""Alerts are sent once, to real servers, and conditions become checks."""

import json
import logging
import re
import smtplib
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from dagster import (
    AssetCheckEvaluation,
    AssetCheckKey,
    AssetCheckSeverity,
    AssetKey,
    AssetObservation,
    AssetRecordsFilter,
)
from pydantic import SecretStr

from caf_pipeline.automation.alerting import due_alerts
from caf_pipeline.defs import evaluations
from caf_pipeline.defs.metadata import progress_metadata
from caf_pipeline.defs.partitions import chunk_partitions
from caf_pipeline.errors import AlertNotSent
from caf_pipeline.ledger.records import ChunkSums
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.settings import AlertSettings
from caf_pipeline.source.protocol import ObjectEvent, QueueMessage
from caf_pipeline.steps import chunk_steps
from caf_pipeline.steps.conditions import Condition, ConditionKind, find_conditions
from caf_pipeline_tests.support.chunk_rows import set_state
from caf_pipeline_tests.support.free_ports import free_port
from caf_pipeline_tests.support.pipeline_runs import (
    SOURCE,
    fail_run,
    reported_checks,
    with_settings,
    with_source,
)
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import archive_chunk
from caf_pipeline_tests.support.ticks import evaluate_tick

pytestmark = pytest.mark.thorough

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

SENSOR = "caf_watch_sources"


class Webhook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_) -> None:
        """Print nothing."""


class Smtp(socketserver.StreamRequestHandler):
    """An SMTP server (RFC 5321) that accepts every mail and stores envelopes and texts."""

    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        while line := self.rfile.readline():
            word = line[:4].upper()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                while (line := self.rfile.readline()) != b".\r\n":
                    self.server.got.append(line.decode().rstrip("\r\n"))
            elif word in (b"MAIL", b"RCPT"):
                self.server.got.append(line.decode().strip())
            refused = getattr(self.server, "refused", None)
            if word == b"EHLO" and (extensions := getattr(self.server, "extensions", b"")):
                self.wfile.write(extensions)
            elif word == b"RCPT" and refused and refused in line:
                self.wfile.write(b"550 no such user\r\n")
            else:
                self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
            if word == b"QUIT":
                return


def serving(server) -> Iterator[object]:
    server.got, server.status = [], 204
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def webhook():
    yield from serving(HTTPServer(("127.0.0.1", 0), Webhook))


@pytest.fixture
def mail_server():
    yield from serving(socketserver.TCPServer(("127.0.0.1", 0), Smtp))


def told(pipeline, webhook=None, **alerts):
    """Return the pipeline with alerts, to the webhook's server if it is given."""
    if webhook:
        alerts["webhook"] = SecretStr(f"http://127.0.0.1:{webhook.server_port}/services/T0/secret")
    return with_settings(pipeline, alerts=AlertSettings(**alerts))


def to_mail(server):
    """Return the settings of mail to ops@example.org by this server."""
    return {
        "mail_to": ("ops@example.org",),
        "mail_from": "caf@example.org",
        "smtp_host": "127.0.0.1",
        "smtp_port": server.server_address[1],
    }


@pytest.fixture
def parked(pipeline):
    """A source with a parked chunk."""
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    chunk_steps.park(pipeline.run_context(), chunk, "failed too often")
    return pipeline, chunk


def test_a_parked_chunk_alerts_webhook_and_mail_once(parked, webhook, mail_server):
    pipeline, chunk = parked
    pipeline = told(pipeline, webhook, **to_mail(mail_server))
    tick = evaluate_tick(pipeline, SENSOR)
    assert "to the webhook" in tick.skip_message
    assert "ops@example.org" in tick.skip_message
    (body,) = webhook.got
    assert body["alerts"] == [
        {
            "source": SOURCE,
            "condition": "parked",
            "status": "begun",
            "severity": "error",
            "text": body["text"],
        }
    ]
    assert body["text"].startswith("1 chunk")
    assert "rcpt TO:<ops@example.org>" in mail_server.got
    assert any("my-source parked" in line for line in mail_server.got)
    assert reported_checks(pipeline) == {
        "caf_no_chunk_is_damaged": "SUCCEEDED",
        "caf_no_chunk_is_parked": "FAILED",
        "caf_source_keeps_up": "SUCCEEDED",
        "caf_few_objects_are_skipped": "SUCCEEDED",
    }

    again = evaluate_tick(pipeline, SENSOR, tick.cursor)
    assert again.skip_message.endswith("nothing to send.")
    assert again.cursor == tick.cursor
    chunk_steps.unpark(pipeline.run_context(), chunk)
    evaluate_tick(pipeline, SENSOR, again.cursor)
    assert [item["status"] for item in webhook.got[-1]["alerts"]] == ["ended"]
    assert len(webhook.got) == 2
    assert reported_checks(pipeline)["caf_no_chunk_is_parked"] == "SUCCEEDED"


def test_a_failed_webhook_fails_the_tick_and_is_retried(parked, webhook, caplog):
    pipeline, _ = parked
    caplog.set_level(logging.INFO)
    webhook.status = 500
    with pytest.raises(AlertNotSent, match=r"127\.0\.0\.1.* 500") as refused:
        evaluate_tick(told(pipeline, webhook), SENSOR)
    away = SimpleNamespace(server_port=free_port())
    with pytest.raises(AlertNotSent, match="answer") as gone:
        evaluate_tick(told(pipeline, away), SENSOR)
    for error in (refused, gone):
        assert "secret" not in f"{error.value}{error.value.hint}{error.value.__cause__}"
    assert (
        reported_checks(pipeline)["caf_no_chunk_is_parked"] == "FAILED"
    )  # the page has it, whoever is away
    with pytest.raises(AlertNotSent, match=r"the mail server 127\.0\.0\.1:"):
        evaluate_tick(
            told(pipeline, mail_to=("a@b",), smtp_host="127.0.0.1", smtp_port=free_port()), SENSOR
        )
    webhook.status = 200
    evaluate_tick(told(pipeline, webhook), SENSOR)
    assert webhook.got[-1]["alerts"][0]["status"] == "begun"
    assert "secret" not in caplog.text


def test_webhook_and_mail_fail_independently(parked, webhook, mail_server):
    pipeline, _ = parked
    webhook.status = 500
    pipeline = told(pipeline, webhook, **to_mail(mail_server))
    tick = evaluate_tick(pipeline, SENSOR)
    assert "to ops@example.org" in tick.skip_message
    assert "500" in tick.skip_message
    with pytest.raises(AlertNotSent, match="HTTP status 500"):
        evaluate_tick(pipeline, SENSOR, tick.cursor)
    webhook.status = 200
    after = evaluate_tick(pipeline, SENSOR, tick.cursor)
    assert after.skip_message.endswith("to the webhook.")
    assert evaluate_tick(pipeline, SENSOR, after.cursor).skip_message.endswith("nothing to send.")
    assert (len(webhook.got), mail_server.got.count("rcpt TO:<ops@example.org>")) == (3, 1)


def test_who_is_named_later_is_told_what_goes_on(parked, webhook):
    pipeline, _ = parked
    tick = evaluate_tick(pipeline, SENSOR)
    evaluate_tick(told(pipeline, webhook), SENSOR, tick.cursor)
    assert [item["status"] for item in webhook.got[0]["alerts"]] == ["begun"]


def test_a_pause_ends_no_delay_and_new_reasons_are_reported(pipeline, webhook):
    pipeline.put(12)
    moved, _ = pipeline.plan()
    withdrawn = f"state = CASE name WHEN '{moved}' THEN 'withdrawn' ELSE state END"
    age(
        pipeline,
        caf_files=f"{withdrawn}, updated_at = now(), created_at = now() - interval '10 days'",
    )
    pipeline = told(pipeline, webhook)
    tick = evaluate_tick(pipeline, SENSOR)
    assert evaluation_of(pipeline).severity.value == "WARN"
    age(pipeline, caf_files="updated_at = now() - interval '7 hours'")
    tick = evaluate_tick(pipeline, SENSOR, tick.cursor)
    assert evaluation_of(pipeline).severity.value == "ERROR"
    assert "my-source" in evaluation_of(pipeline).description
    pipeline.ledger.controls.set("paused", "the building moves")
    tick = evaluate_tick(pipeline, SENSOR, tick.cursor)
    pipeline.ledger.controls.set("paused", None)
    last = evaluate_tick(pipeline, SENSOR, tick.cursor).skip_message
    assert last.startswith("2 conditions")
    assert last.endswith("nothing to send.")
    assert [[item["condition"] for item in body["alerts"]] for body in webhook.got] == [
        ["late"],
        ["stalled"],
    ]


def alerts_of(webhook) -> list[list[tuple[str, str, str]]]:
    return [
        [(item["source"], item["condition"], item["status"]) for item in body["alerts"]]
        for body in webhook.got
    ]


def test_an_unreachable_ledger_alerts_once_and_ends_no_condition(parked, webhook):
    pipeline, _ = parked
    pipeline = told(pipeline, webhook)
    nowhere = SecretStr(f"postgresql://caf@127.0.0.1:{free_port()}/caf")
    away = with_settings(pipeline, database_url=nowhere)
    tick = evaluate_tick(pipeline, SENSOR)
    for output in ("1 alert sent to the webhook", "nothing to send"):
        tick = evaluate_tick(away, SENSOR, tick.cursor, tick_seconds=10)
        assert output in tick.skip_message
    assert evaluate_tick(pipeline, SENSOR, tick.cursor).skip_message.endswith("to the webhook.")
    of_all = "(all sources)", "ledger_away"
    assert alerts_of(webhook) == [
        [(SOURCE, "parked", "begun")],
        [(*of_all, "begun")],
        [(*of_all, "ended")],
    ]


def test_damaged_chunks_and_failed_checks_send_alerts(parked, webhook):
    pipeline, _ = parked
    with connected(pipeline.ledger.database) as connection:
        set_state(connection, "damaged")
    for name, passed in (
        ("caf_storage_plan_lasts", False),
        ("caf_plan_accounts_for_inventory", True),
    ):
        failed = AssetCheckEvaluation(
            asset_key=AssetKey([SOURCE, "chunk_plan"]),
            check_name=name,
            passed=passed,
            metadata={},
            severity=AssetCheckSeverity.WARN,
            description="It ends in 3 days.",
        )
        pipeline.instance.report_runless_asset_event(failed)
    pipeline = told(pipeline, webhook)
    evaluate_tick(pipeline, SENSOR)
    assert alerts_of(webhook) == [[(SOURCE, "damaged", "begun"), (SOURCE, "space_ends", "begun")]]
    assert "caf_storage_plan_lasts" in webhook.got[0]["text"]
    assert "`caf jackal buy`" in webhook.got[0]["text"]
    assert reported_checks(pipeline)["caf_no_chunk_is_damaged"] == "FAILED"


def begin_a_run(pipeline, job: str, *, failed: bool):
    """Create a run that should evaluate checks; it may fail before it does."""
    run = pipeline.instance.create_run_for_job(job_def=pipeline.defs.resolve_job_def(job))
    if failed:
        pipeline.instance.report_run_failed(run, message="S3 was away")


@pytest.mark.parametrize("failed", [False, True], ids=["under way", "failed"])
def test_an_unevaluated_check_does_not_suppress_alerts(parked, webhook, failed):
    pipeline, chunk = parked
    pipeline = told(pipeline, webhook)
    for name in ("caf_plan_accounts_for_inventory", "caf_storage_plan_lasts"):
        failure = AssetCheckEvaluation(
            asset_key=AssetKey([SOURCE, "chunk_plan"]),
            check_name=name,
            passed=False,
            severity=AssetCheckSeverity.WARN,
        )
        pipeline.instance.report_runless_asset_event(failure)
    begin_a_run(pipeline, "caf_plan_my_source", failed=failed)
    tick = evaluate_tick(pipeline, SENSOR)
    assert "3 alerts" in tick.skip_message
    assert [item["condition"] for item in webhook.got[0]["alerts"]] == [
        "parked",
        "space_ends",
        "unaccounted",
    ]
    chunk_steps.unpark(pipeline.run_context(), chunk)
    begin_a_run(pipeline, "caf_plan_my_source", failed=failed)
    tick = evaluate_tick(pipeline, SENSOR, tick.cursor)  # what the last evaluation found goes on
    assert [(item["condition"], item["status"]) for item in webhook.got[1]["alerts"]] == [
        ("parked", "ended")
    ]


@pytest.mark.parametrize("failed", [False, True], ids=["under way", "failed"])
def test_the_sensor_reports_checks_that_a_run_left_unevaluated(parked, failed):
    pipeline, _ = parked
    evaluate_tick(pipeline, SENSOR)
    assets = {
        AssetKey([SOURCE, name]) for name in ("s3_inventory", "chunk_plan")
    }  # as the UI materializes them
    job = pipeline.defs.resolve_implicit_global_asset_job_def().get_subset(asset_selection=assets)
    run = pipeline.instance.create_run_for_job(job_def=job)
    if failed:
        pipeline.instance.report_run_failed(run, message="S3 was away")
    assert reported_checks(pipeline)["caf_no_chunk_is_parked"] == "PLANNED"
    evaluate_tick(pipeline, SENSOR)
    assert reported_checks(pipeline)["caf_no_chunk_is_parked"] == "FAILED"
    assert reported_checks(pipeline)["caf_source_keeps_up"] == "SUCCEEDED"


def test_a_refusing_database_counts_as_unreachable(parked, webhook):
    pipeline, _ = parked
    pipeline = told(pipeline, webhook)
    url = pipeline.settings.database_url.get_secret_value()
    gone = SecretStr(
        re.sub(r"/[^/?]*(?=\?|$)", "/no_such_database", url, count=1)
        if "?" in url
        else url + "_gone"
    )
    tick = evaluate_tick(with_settings(pipeline, database_url=gone), SENSOR)
    assert "does not exist" in tick.skip_message
    assert [item["condition"] for item in webhook.got[0]["alerts"]] == ["ledger_away"]
    evaluate_tick(pipeline, SENSOR, tick.cursor)
    assert {item["condition"]: item["status"] for item in webhook.got[1]["alerts"]} == {
        "ledger_away": "ended",
        "parked": "begun",
    }


def test_a_refused_recipient_does_not_repeat_the_mail(parked, mail_server):
    pipeline, _ = parked
    mail_server.refused = b"gone@"
    port, addresses = mail_server.server_address[1], ("ops@example.org", "gone@example.org")
    pipeline = told(
        pipeline,
        smtp_host="127.0.0.1",
        smtp_port=port,
        mail_to=addresses,
        mail_from="caf@example.org",
    )
    tick = evaluate_tick(pipeline, SENSOR)
    assert f"127.0.0.1:{port} refuses gone@example.org" in tick.skip_message
    assert evaluate_tick(pipeline, SENSOR, tick.cursor).skip_message.endswith("nothing to send.")
    assert sum(line.startswith("Subject:") for line in mail_server.got) == 1


def test_an_unencodable_login_is_not_shown_in_the_error(parked, webhook, mail_server, monkeypatch):
    pipeline, _ = parked
    monkeypatch.setattr(smtplib.SMTP, "starttls", lambda *_, **__: None)
    mail_server.extensions = b"250-here\r\n250 AUTH LOGIN PLAIN\r\n"
    login = {"smtp_user": "u", "smtp_password": SecretStr("p\u00e4sswort")}
    mail = to_mail(mail_server) | login | {"smtp_security": "starttls"}
    pipeline = told(pipeline, webhook, **mail)
    tick = evaluate_tick(pipeline, SENSOR)
    assert "login" in tick.skip_message
    assert "sswort" not in tick.skip_message
    with pytest.raises(AlertNotSent, match="login"):
        evaluate_tick(pipeline, SENSOR, tick.cursor)
    assert len(webhook.got) == 1


def test_checks_are_reported_without_alert_recipients(parked):
    pipeline, _ = parked
    message = evaluate_tick(pipeline, SENSOR).skip_message
    assert "mail_to" in message
    assert reported_checks(pipeline)["caf_no_chunk_is_parked"] == "FAILED"
    records = len(pipeline.instance.all_asset_keys()), reported_checks(pipeline)
    evaluate_tick(pipeline, SENSOR)
    assert (len(pipeline.instance.all_asset_keys()), reported_checks(pipeline)) == records


def age(pipeline, **changes: str) -> None:
    with connected(pipeline.ledger.database) as connection:
        for table, change in changes.items():
            connection.execute(f"UPDATE {table} SET {change}")


def evaluation_of(pipeline):
    """Return the last evaluation of `caf_source_keeps_up`."""
    key = AssetCheckKey(AssetKey([SOURCE, "chunk_plan"]), "caf_source_keeps_up")
    return pipeline.instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[
        key
    ].evaluation


def kinds(pipeline, *, paused: bool = False, on_jackal: bool = False, **changes) -> set[str]:
    source = pipeline.settings.sources[SOURCE]
    alerts = AlertSettings(**changes)
    (progress,) = pipeline.ledger.progress.of([SOURCE])
    return {
        item.kind.value
        for item in find_conditions(progress, source, alerts, paused=paused, on_jackal=on_jackal)
    }


def test_conditions_come_from_the_ledger_and_pauses_explain_delays(pipeline):
    assert kinds(pipeline) == set()  # nothing was planned yet
    pipeline.put(12)
    chunk, _ = pipeline.plan()
    assert kinds(pipeline) == set()
    long_ago = "updated_at = now() - interval '7 hours', created_at = now() - interval '10 days'"
    age(pipeline, caf_files=long_ago, inventories="taken_at = now() - interval '3 days'")
    event = QueueMessage("m", "", b"?", [ObjectEvent(b"k", "")], "it is not JSON")
    pipeline.ledger.notices.take_messages(SOURCE, [event])
    assert kinds(pipeline) == {"stalled", "late", "no_inventory", "messages_set_apart"}
    assert kinds(pipeline, paused=True) == {"messages_set_apart"}
    age(pipeline, noticed_keys="noticed_at = now() - interval '3 days'")
    chunk_steps.park(pipeline.run_context(), chunk, "why")  # something moves again
    assert kinds(pipeline) == {
        "parked",
        "late",
        "no_inventory",
        "messages_set_apart",
        "unlisted_events",
    }

    age(
        pipeline, caf_files=f"state = 'packing', {long_ago.replace('7 hours', '1 minute')}"
    )  # tried again while S3 is away
    assert "stalled" in kinds(pipeline)
    age(pipeline, caf_files=f"state = 'planned', {long_ago}")
    age(
        pipeline, caf_files=f"updated_at = now(), created_at = now() WHERE name <> '{chunk}'"
    )  # and new objects are planned
    assert "stalled" in kinds(pipeline)
    age(
        pipeline,
        caf_files=f"state = CASE name WHEN '{chunk}' THEN 'parked' ELSE 'planned' END, {long_ago}",
    )

    pipeline.bucket.delete("key-011")
    (other,) = [name for name in pipeline.chunks() if name != chunk]
    assert pipeline.execute("caf_archive_my_source", partition_key=other).success
    assert "skipped" in kinds(pipeline)
    assert "skipped" not in kinds(pipeline, skipped_share=0.5)
    assert "late" not in kinds(pipeline)


def test_unproven_chunks_send_alerts_on_jackal(pipeline):
    pipeline.put(12)
    chunk, other = pipeline.plan()
    for name in (chunk, other):
        archive_chunk(pipeline.run_context(), name)
    assert "unwatched" not in kinds(pipeline, on_jackal=True)
    age(pipeline, caf_files=f"located_at = now() - interval '3 days' WHERE name = '{chunk}'")
    assert "unwatched" in kinds(pipeline, on_jackal=True)  # though new ones are located
    assert "unwatched" not in kinds(pipeline, on_jackal=True, paused=True)
    assert "unwatched" not in kinds(pipeline)  # in a folder nothing is to be proven
    assert prove_chunk(pipeline.run_context(), chunk).proven
    assert "unwatched" not in kinds(pipeline, on_jackal=True)
    age(pipeline, chunk_copies="checked_at = checked_at - interval '3 days'")
    assert "unwatched" in kinds(pipeline, on_jackal=True)


def test_an_alert_is_repeated_after_a_day_unless_off():
    parked = {"a": [Condition(ConditionKind.PARKED, True, "said", "hint")]}
    now = datetime.now(UTC)
    first, then = due_alerts(parked, {}, now, AlertSettings())
    assert [item.status for item in first] == ["begun"]
    later = now + timedelta(hours=25)
    assert due_alerts(parked, then, now + timedelta(hours=23), AlertSettings()) == ([], then)
    again, after = due_alerts(parked, then, later, AlertSettings())
    assert [item.status for item in again] == ["goes on"]
    assert after == {"a": {"parked": later.isoformat()}}
    assert due_alerts(parked, then, later, AlertSettings(repeat_after=0)) == ([], then)
    assert [
        item.status
        for item in due_alerts(parked, then, now - timedelta(days=300), AlertSettings())[0]
    ] == ["goes on"]
    assert due_alerts({}, then, later, AlertSettings()) == (
        [],
        {},
    )  # a source that is gone from the settings


def no_inventory(pipeline) -> Condition:
    (progress,) = pipeline.ledger.progress.of([SOURCE])
    settings = pipeline.settings.sources[SOURCE]
    (condition,) = find_conditions(
        progress, settings, AlertSettings(), paused=False, on_jackal=False
    )
    assert condition.kind == ConditionKind.NO_INVENTORY
    return condition


def test_only_an_automatic_source_must_have_been_planned(pipeline):
    pipeline.run_context()
    age(pipeline, sources="created_at = now() - interval '3 days'")
    assert kinds(pipeline) == set()
    assert "its daily schedule" in no_inventory(with_source(pipeline, automatic=True)).hint


def test_an_old_inventory_of_a_manual_source_names_the_command(pipeline):
    pipeline.put(1)
    (chunk,) = pipeline.plan()
    archive_chunk(pipeline.run_context(), chunk)
    age(pipeline, inventories="taken_at = now() - interval '3 days'")
    hint = no_inventory(pipeline).hint
    assert f"`caf run {SOURCE}`" in hint
    assert f"automatic = true in [sources.{SOURCE}]" in hint
    assert "its daily schedule" in no_inventory(with_source(pipeline, automatic=True)).hint


def test_an_inventory_from_the_future_is_not_fresh(pipeline):
    pipeline.put(1)
    pipeline.plan()
    assert kinds(pipeline) == set()
    age(pipeline, inventories="taken_at = now() + interval '40 days'")
    assert kinds(pipeline) == {"no_inventory"}


def test_check_results_are_repeated_for_a_new_plan(parked):
    pipeline, _ = parked
    for _ in range(2):
        evaluate_tick(pipeline, SENSOR)
        (record,) = pipeline.instance.get_asset_records([AssetKey([SOURCE, "chunk_plan"])])
        made = record.asset_entry.last_materialization_record
        assert evaluation_of(pipeline).target_materialization_data.storage_id == made.storage_id
        pipeline.plan()


def test_the_space_check_is_repeated_once_for_each_plan(pipeline):
    pipeline.put(1)
    pipeline.plan()
    plan, key = (
        AssetKey([SOURCE, "chunk_plan"]),
        AssetCheckKey(AssetKey([SOURCE, "chunk_plan"]), "caf_storage_plan_lasts"),
    )
    numbers = {"free_gib": 5.0, "days_left": 3.0}
    result = AssetCheckEvaluation(
        plan, key.name, False, numbers, severity=AssetCheckSeverity.WARN, description="It ends."
    )
    pipeline.instance.report_runless_asset_event(result)
    history = lambda: pipeline.instance.event_log_storage.get_asset_check_execution_history(  # noqa: E731
        key, limit=10
    )
    for count in (2, 3):
        evaluate_tick(pipeline, SENSOR)
        evaluate_tick(pipeline, SENSOR)
        (record,) = pipeline.instance.get_asset_records([plan])
        last, *others = [item.evaluation for item in history()]
        assert len(others) == count - 1
        assert (
            last.target_materialization_data.storage_id
            == record.asset_entry.last_materialization_record.storage_id
        )
        assert (last.passed, last.severity, last.description) == (
            False,
            AssetCheckSeverity.WARN,
            "It ends.",
        )
        assert {name: value.value for name, value in last.metadata.items()} == numbers
        pipeline.plan()


def observations(pipeline) -> list[dict[str, object]]:
    """Return the observations of the source, latest first."""
    result = pipeline.instance.fetch_observations(
        AssetKey([SOURCE, "s3_inventory"]), limit=10
    ).records
    return [
        {name: value.value for name, value in item.asset_observation.metadata.items()}
        for item in result
    ]


def test_a_changed_source_is_observed_once_an_hour(pipeline, monkeypatch):
    pipeline.put(12)
    chunks = pipeline.plan()
    evaluate_tick(pipeline, SENSOR)
    (before,) = observations(pipeline)
    assert (before["archived_objects"], before["pending_objects"]) == (0, 12)
    for chunk in chunks:
        archive_chunk(pipeline.run_context(), chunk)
    age(pipeline, caf_files="located_at = located_at - interval '10 minutes'")
    evaluate_tick(pipeline, SENSOR)
    assert observations(pipeline) == [before]

    monkeypatch.setattr(evaluations, "OBSERVE_SECONDS", 0)
    evaluate_tick(pipeline, SENSOR)
    assert observations(pipeline) == [
        {
            "archived_objects": 12,
            "pending_objects": 0,
            "skipped_objects": 0,
            "archived_gib": 0.0,  # 35 KiB
            "pending_gib": 0.0,
            "oldest_pending_hours": 0.0,
            "archived_mib_per_second": 0.0,  # 18 KB in ten minutes
            "copies_listed": 2,
            "copies_unlisted": 0,
            "copies_faulty": 0,
        },
        before,
    ]
    evaluate_tick(pipeline, SENSOR)
    assert len(observations(pipeline)) == 2


def test_observed_waits_do_not_hide_progress(pipeline):
    wait = AssetObservation(
        AssetKey([SOURCE, "s3_inventory"]), metadata={"waited_for": "a provider"}
    )
    pipeline.put(12)
    pipeline.plan()
    pipeline.instance.report_runless_asset_event(wait)
    evaluate_tick(pipeline, SENSOR)
    pipeline.instance.report_runless_asset_event(wait)
    evaluate_tick(pipeline, SENSOR)
    assert [item.get("pending_objects") for item in observations(pipeline)] == [None, 12, None]


def test_what_waits_longest_and_how_fast_it_goes_are_observed(pipeline):
    pipeline.put(18, size_bytes=3_000)
    *_, third = pipeline.plan()
    age(pipeline, caf_files="created_at = now() - interval '90 minutes'")
    (progress,) = pipeline.ledger.progress.of([SOURCE])
    archived = replace(progress, window_seconds=60.0, recent=ChunkSums(1, 20, 600 << 20))
    shown = progress_metadata(archived, {(SOURCE, "faulty"): 1, ("other", "listed"): 5})
    assert (shown["oldest_pending_hours"], shown["archived_mib_per_second"]) == (1.5, 10.0)
    assert (shown["copies_listed"], shown["copies_faulty"]) == (0, 1)
    chunk_steps.park(pipeline.run_context(), third, "why")
    (progress,) = pipeline.ledger.progress.of([SOURCE])
    assert progress_metadata(progress, {})["pending_objects"] == 18


def test_a_warning_that_becomes_an_error_is_sent_at_once():
    def found(severe: bool) -> dict[str, list[Condition]]:
        return {"a": [Condition(ConditionKind.SPACE_ENDS, severe, "sentence", "hint")]}

    now = datetime.now(UTC)
    _, warned = due_alerts(found(severe=False), {}, now, AlertSettings())
    assert due_alerts(found(severe=False), warned, now + timedelta(hours=1), AlertSettings()) == (
        [],
        warned,
    )
    alerts, sent = due_alerts(found(severe=True), warned, now + timedelta(hours=1), AlertSettings())
    assert [(alert.status, alert.as_json()["severity"]) for alert in alerts] == [
        ("goes on", "error")
    ]
    assert due_alerts(found(severe=True), sent, now + timedelta(hours=2), AlertSettings()) == (
        [],
        sent,
    )


def hour_later(cursor: str) -> str:
    """Return a cursor whose alerts were sent an hour earlier."""

    def earlier(time: re.Match[str]) -> str:
        return (datetime.fromisoformat(time[0]) - timedelta(hours=1)).isoformat()

    return re.sub(r"\d{4}-\d\d-\d\dT[\d:.+]+", earlier, cursor)


def test_each_escalation_is_sent_at_most_hourly(pipeline, webhook):
    pipeline.put(1)
    pipeline.plan()
    pipeline = told(pipeline, webhook)

    def tick(severity: AssetCheckSeverity, cursor: str | None) -> tuple[str, int]:
        """Return the cursor and the number of alerts sent so far."""
        failed = AssetCheckEvaluation(
            asset_key=AssetKey([SOURCE, "chunk_plan"]),
            check_name="caf_storage_plan_lasts",
            passed=False,
            severity=severity,
        )
        pipeline.instance.report_runless_asset_event(failed)
        return evaluate_tick(pipeline, SENSOR, cursor).cursor, len(webhook.got)

    warning, error = AssetCheckSeverity.WARN, AssetCheckSeverity.ERROR
    cursor, numbers = None, []
    for severity in (warning, error, warning, error, error):
        cursor, number = tick(severity, cursor)
        numbers.append(number)
    cursor = hour_later(cursor)
    for severity in (error, error, warning, error):
        cursor, number = tick(severity, cursor)
        numbers.append(number)
    assert numbers == [1, 2, 2, 2, 2, 3, 3, 3, 3]
    cursor, _ = tick(warning, cursor)
    assert tick(error, hour_later(cursor))[1] == 4
    assert [body["alerts"][0]["severity"] for body in webhook.got] == [
        "warning",
        "error",
        "error",
        "error",
    ]


def statuses(pipeline, chunk: str) -> list[str]:
    """Return how Dagster shows the chunk in each of its assets."""
    return [
        pipeline.instance.get_status_by_partition(
            AssetKey([SOURCE, name]), [chunk], chunk_partitions(SOURCE)
        )[chunk].value
        for name in ("caf_chunk", "stored_chunk", "file_locations")
    ]


def versions(pipeline, chunk: str, asset: str) -> list[str]:
    of_chunk = AssetRecordsFilter(AssetKey([SOURCE, asset]), asset_partitions=[chunk])
    records = pipeline.instance.fetch_materializations(of_chunk, limit=10).records
    return [record.asset_materialization.tags["dagster/data_version"] for record in records]


def test_a_failed_run_does_not_hide_a_located_chunk(pipeline):
    pipeline.put(1)
    (located,) = pipeline.plan()
    assert pipeline.execute("caf_archive_my_source", partition_key=located).success
    pipeline.put(1, prefix="later")
    (planned,) = set(pipeline.plan()) - {located}
    for chunk in (located, planned):
        fail_run(pipeline, chunk, begun=False)
        assert statuses(pipeline, chunk) == ["FAILED"] * 3
    for _ in range(2):
        evaluate_tick(pipeline, SENSOR)
        assert statuses(pipeline, located) == ["MATERIALIZED"] * 3
        assert statuses(pipeline, planned) == ["FAILED"] * 3
    root = pipeline.ledger.chunks.get(located).merkle_root.hex()
    for asset in ("caf_chunk", "stored_chunk", "file_locations"):
        reported, _of_the_run = versions(pipeline, located, asset)
        assert reported == root
