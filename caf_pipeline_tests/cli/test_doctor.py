"""`caf doctor`: output, exit statuses, bad input, and what a killed `caf run` leaves."""

import json
import os
import time

import psycopg
import pytest
from dagster import AssetKey

from caf_pipeline.caf.merkle import IMPLEMENTATION
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.dagster_host.team_project import HOME_VARIABLE
from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.partitions import chunk_partitions
from caf_pipeline.formats import age
from caf_pipeline.settings import load_settings
from caf_pipeline_tests.support.chunk_rows import set_state
from caf_pipeline_tests.support.command_line import (
    CommandLine,
    archive_source,
    expect_error,
    source_text,
)
from caf_pipeline_tests.support.doctors import everything, holding, killed_holding
from caf_pipeline_tests.support.jackal_command_line import (
    S3_KEYS,
    jackal_command_line,
    wallet_with_space,
)
from caf_pipeline_tests.support.new_ledgers import new_ledger  # noqa: F401 - a fixture

pytestmark = pytest.mark.thorough

KEPT = {"CAF_JACKAL__KEEP_STAGED_WINDOWS": "1000"}  # windows of this network pass in seconds


def fill(bucket):
    for number in range(20):
        bucket.put(f"key-{number:02d}", os.urandom(100_000))


@pytest.fixture
def caf(tmp_path, database_url, s3_server, new_bucket) -> CommandLine:
    """A command line whose source `src` has three chunks, not archived."""
    fill(new_bucket)
    caf = CommandLine(tmp_path, S3_KEYS | {"CAF_DATABASE_URL": database_url})
    caf.settings(source_text(s3_server, new_bucket.name))
    return caf


def lines(done):
    return done.out.decode().splitlines()


def records(done):
    return [json.loads(line) for line in lines(done)]


def test_a_doctor_without_findings_exits_with_0(caf):
    done = caf("doctor")
    assert (done.status, lines(done)) == (0, ["nothing was found"])
    archive_source(caf)
    done = caf("doctor", "src")
    assert (done.status, lines(done)) == (0, ["nothing was found"]), done.err
    assert (done.err.count("\n"), IMPLEMENTATION in done.err) == (1, True)


def test_a_single_recipient_is_a_warning(caf):
    recipients = [str(age.new_identity().recipient) for _ in range(2)]
    variable, private = "CAF_ENCRYPTION__RECIPIENTS", {"CAF_SOURCES__SRC__PUBLIC": "false"}
    done = caf("doctor", "--json", **private, **{variable: json.dumps(recipients[:1])})
    assert done.status == 0
    (finding,) = records(done)
    assert (finding["kind"], finding["name"], finding["turn"]) == ("keys", "src", "nobody")
    assert records(caf("doctor", "--json", **private, **{variable: json.dumps(recipients)})) == []


def test_a_partition_that_no_plan_made_is_removed(caf, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, "to be put back")
    archive_source(caf)
    settings = load_settings(caf.folder / "caf.toml")
    with open_instance(settings) as instance:
        chunks = set(instance.get_dynamic_partitions("caf_src_chunks"))
        instance.add_dynamic_partitions("caf_src_chunks", ["by-hand", "src-0a1b2c3d-00001"])
        assert caf("doctor", "--dry-run").status == 1
        assert set(instance.get_dynamic_partitions("caf_src_chunks")) > chunks
        done = caf("doctor", "--json")
        findings = {(record["kind"], record["name"], record["turn"]) for record in records(done)}
        assert findings == {
            ("partition", name, "mended") for name in ("by-hand", "src-0a1b2c3d-00001")
        }
        assert (done.status, set(instance.get_dynamic_partitions("caf_src_chunks"))) == (0, chunks)
    assert lines(caf("doctor")) == ["nothing was found"]


def test_a_located_chunk_shown_as_failed_is_reported_once(caf, database_url, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, "to be put back")
    archive_source(caf)
    with psycopg.connect(database_url) as connection:
        (chunk,) = connection.execute("SELECT name FROM caf_files ORDER BY name").fetchone()
    settings = load_settings(caf.folder / "caf.toml")
    with open_instance(settings) as instance:
        instance.add_dynamic_partitions("caf_src_chunks", [chunk])
        job = build_defs(settings).resolve_job_def("caf_archive_src")
        run = instance.create_run_for_job(job, tags={"dagster/partition": chunk})
        instance.report_run_failed(run, message="its code location could not be loaded")
        key, partitions = AssetKey(["src", "stored_chunk"]), chunk_partitions("src")
        for status in ("FAILED", "MATERIALIZED"):
            shown = instance.get_status_by_partition(key, [chunk], partitions)
            assert shown[chunk].value == status
            findings = [
                (record["kind"], record["name"], record["turn"])
                for record in records(caf("doctor", "--json"))
            ]
            assert findings == [("partition", chunk, "mended")] * (status == "FAILED")


def test_with_an_empty_ledger_partitions_named_like_chunks_stay(caf, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, "to be put back")
    with open_instance(load_settings(caf.folder / "caf.toml")) as instance:
        instance.add_dynamic_partitions("caf_src_chunks", ["by-hand", "src-0a1b2c3d-00001"])
        assert caf("doctor").status == 0
        assert instance.get_dynamic_partitions("caf_src_chunks") == ["src-0a1b2c3d-00001"]


def test_a_finding_is_reported_then_repaired_then_gone(caf, tmp_path, database_url):
    assert caf("doctor").status == 0  # opening a folder store makes its folder
    killed_holding(database_url, "plan/src")
    before = everything(tmp_path, database_url)
    done = caf.process("doctor", "--dry-run")
    assert done.status == 1
    finding, closing = lines(done)
    assert finding.startswith("lease  plan/src: run run-child (process ")
    assert "; would be " in finding
    assert closing.endswith(": 1 not mended")
    assert everything(tmp_path, database_url) == before
    done = caf("doctor")
    assert done.status == 0
    assert lines(done)[0].endswith("; given back")
    assert lines(done)[1].endswith(": 1 mended")
    assert lines(caf("doctor")) == ["nothing was found"]


def test_json_is_an_object_a_line(caf, database_url):
    killed_holding(database_url, "plan/src")
    (finding,) = records(caf("doctor", "--dry-run", "--json"))
    assert (finding["kind"], finding["name"], finding["turn"], finding["done"]) == (
        "lease",
        "plan/src",
        "doctor",
        None,
    )
    (done,) = records(caf("doctor", "--json"))
    assert (done["turn"], done["done"], done["error"]) == ("mended", "given back", None)
    assert caf("doctor", "--json").out == b""


def test_findings_for_an_operator_exit_with_1(caf):
    archive_source(caf)
    next(caf.folder.rglob("chunks/*.caf")).unlink()
    done = caf("doctor")
    expect_error(done, 1, "operator")
    assert "'caf repair" in lines(done)[0]
    expect_error(caf("doctor"), 1, "operator")


def test_findings_for_the_next_run_exit_with_0(caf, database_url):
    archive_source(caf)
    with psycopg.connect(database_url, autocommit=True) as connection:
        with connection.transaction():
            set_state(connection, "uploading", "number = 1")
        connection.execute(
            "WITH pending AS (DELETE FROM file_locations USING caf_files"
            " WHERE file_locations.caf_file_id = caf_files.caf_file_id AND number = 1 RETURNING "
            "file_locations.*),"
            " claimed AS (INSERT INTO claims SELECT source_id, file_path, version_id, etag, "
            "size_bytes, rewritten_at, caf_file_id"
            " FROM pending)"
            " INSERT INTO pending_locations SELECT * FROM pending"
        )
    done = caf("doctor")
    assert done.status == 0, done.err
    assert any("'uploading'" in line and "'caf run src'" in line for line in lines(done))
    assert caf("run").status == 0
    assert lines(caf("doctor")) == ["nothing was found"]


def test_a_source_of_the_ledger_alone_is_examined(caf, database_url):
    archive_source(caf)
    caf.settings("")
    killed_holding(database_url, "plan/src")
    done = caf("doctor", "src")
    assert done.status == 0, done.err
    assert "given back" in lines(done)[0]
    assert "caf.toml" in lines(done)[1]


def test_doctor_names_the_source_that_no_rebuild_restored(caf, new_ledger):
    text = (caf.folder / "caf.toml").read_text()
    caf.settings(text + text.replace("sources.src", "sources.other") + 'prefix = "key-0"\n')
    for source in ("src", "other"):
        archive_source(caf, source)
    fresh = new_ledger()
    caf.environment["CAF_DATABASE_URL"] = fresh.url
    assert caf("rebuild", "src", "--yes").status == 0
    done = caf("doctor")
    assert done.status == 1, done.err
    assert "'caf rebuild other'" in done.out.decode()
    assert fresh.lookup.sources() == ["src"]
    assert caf("rebuild", "other", "--yes").status == 0
    assert fresh.chunks.account("other").located_objects == 10
    assert lines(caf("doctor")) == ["nothing was found"]


def test_s3_is_not_needed(caf, database_url):
    archive_source(caf)
    killed_holding(database_url, "plan/src")
    # A different endpoint would be a different source, so a proxy without a server makes S3
    # unreachable.
    done = caf("doctor", HTTP_PROXY="http://127.0.0.1:9", http_proxy="http://127.0.0.1:9")
    assert (done.status, lines(done)[-1]) == (0, "1 thing found: 1 mended"), done.err


# --- on Jackal


@pytest.fixture
def on_jackal(tmp_path, network, database_url, s3_server, new_bucket) -> CommandLine:
    """The same source as two chunks on Jackal."""
    fill(new_bucket)
    words = wallet_with_space(network).words
    caf = jackal_command_line(tmp_path, network, words, CAF_DATABASE_URL=database_url, **KEPT)
    caf.settings(source_text(s3_server, new_bucket.name, target_size="1200KiB"))
    return caf


def test_a_dry_run_accepts_an_expired_kept_file(on_jackal):
    archive_source(on_jackal)
    done = on_jackal("doctor", "--dry-run")
    assert (done.status, lines(done)) == (0, ["nothing was found"]), done.err
    over = {"CAF_JACKAL__KEEP_STAGED_WINDOWS": "0"}
    done = on_jackal("doctor", "--dry-run", **over)
    assert done.status == 0, done.err
    assert all(line.endswith("; would be removed") for line in lines(done)[:-1])
    assert lines(done)[-1].endswith(" next run")
    assert all(line.endswith("; removed") for line in lines(on_jackal("doctor", **over))[:-1])
    assert lines(on_jackal("doctor", "--dry-run", **over)) == ["nothing was found"]


def test_without_the_chain_other_checks_run_and_exit_with_7(on_jackal, network, database_url):
    killed_holding(database_url, "plan/src")
    network.kill()
    done = on_jackal("doctor")
    assert done.status == 7
    assert any(line.endswith("; given back") for line in lines(done))
    assert any(line.startswith("not looked at  ") and "src" in line for line in lines(done))
    expect_error(done, 7, "127.0.0.1")


def test_without_a_wallet_other_checks_run_and_exit_with_3(on_jackal, database_url):
    killed_holding(database_url, "plan/src")
    done = on_jackal("doctor", JACKAL_MNEMONIC="")
    assert any("given back" in line for line in lines(done))
    assert done.status == 3
    assert on_jackal.environment["JACKAL_MNEMONIC"] not in done.err


@pytest.mark.parametrize("reached", ["posting", "uploading"])
def test_doctor_and_another_run_finish_a_killed_run(on_jackal, network, database_url, reached):
    run = on_jackal.start("run")
    with psycopg.connect(database_url, autocommit=True) as connection:
        while not connection.execute(
            "SELECT 1 FROM chunks WHERE state = %s", (reached,)
        ).fetchone():
            assert run.poll() is None, run.communicate()[1].decode()
            time.sleep(0.01)
    run.kill()
    run.communicate()
    done = on_jackal("doctor")
    assert done.status == 0, done.err
    assert on_jackal("run").status == 0
    assert lines(on_jackal("doctor")) == ["nothing was found"]
    account = next(
        line for line in records(on_jackal("status", "--json")) if "located_objects" in line
    )
    assert (account["located_objects"], account["claimed_objects"]) == (20, 0)
    roots = [file["merkle"] for file in network.state()["files"]]
    assert len(roots) == len(set(roots))


def test_a_live_holder_is_left_alone(caf, database_url):
    with holding(database_url, "plan/src"):
        assert lines(caf("doctor")) == ["nothing was found"]
