"""`caf logs search`: matches, the logs it fetches, and the logs it cannot search."""

import json
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from caf_pipeline.retrieval import log_search
from caf_pipeline_tests.support.clp_packing import packed
from caf_pipeline_tests.support.command_line import (
    archive_source,
    expect_error,
    opened_context,
    source_text,
)
from caf_pipeline_tests.support.jackal_command_line import jackal_command_line, wallet_with_space
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.s3_server import make_bucket

pytestmark = pytest.mark.skipif(
    find_spec("yscope_clp_core") is None,
    reason="clp-s is not installed: its wheel is for Linux on x86-64",
)

DAYS = {"logs/21": 1_700_000_000_000, "logs/22": 1_700_086_400_000, "logs/23": 1_700_172_800_000}
"""The first record of each log: 2023-11-14 22:13:20 UTC, and one and two days later.

Each log has a record every second for 200 seconds.
"""

SECOND_DAY = ("--from", "2023-11-15T12:00", "--to", "2023-11-16T12:00:00+02:00")


@pytest.fixture(scope="module")
def caf(tmp_path_factory, network, s3_server, databases):
    folder = tmp_path_factory.mktemp("logs")
    bucket = make_bucket(s3_server)
    for key, first in DAYS.items():
        records = [
            {"ts": first + 1000 * n, "level": "INFO" if n % 50 else "ERROR", "n": n}
            for n in range(200)
        ]
        bucket.put(key, packed(folder / key[-2:], records, "--timestamp-key", "ts"))
    bucket.put("logs/22-note", b"\xfdno log at all, whatever its key says" * 10)
    bucket.put(
        "untimed",
        packed(
            folder / "untimed",
            [{"level": "ERROR", "n": 1.5}, {"level": "ERROR", "text": "\x9b31m\u2028"}],
        ),
    )
    whole = bucket.client.get_object(Bucket=bucket.name, Key="logs/21")["Body"].read()
    bucket.put("damaged/a", whole)
    bucket.put("damaged/b", whole[:-1])  # clp-s aborts
    bucket.put("damaged/c", whole[:100])  # its metadata are unreadable
    bucket.put("damaged/d", whole)
    caf = jackal_command_line(
        folder, network, wallet_with_space(network).words, CAF_DATABASE_URL=databases.take().url
    )
    caf.settings(source_text(s3_server, bucket.name))
    archive_source(caf)
    return caf


def downloads(network):
    return sum(provider["downloads"] for provider in network.state()["providers"])


def found(done):
    """Return the key and the number of each record."""
    return [
        (match["key"], match["record"].get("n")) for match in map(json.loads, done.out.splitlines())
    ]


def staged(caf):
    return [path.name for path in (caf.folder / ".caf" / "staging").glob(".searching-*")]


@pytest.mark.thorough
def test_only_logs_of_the_period_are_fetched_once_each(caf, network):
    before = downloads(network)
    done = caf("logs", "search", "src", "logs/", "level: ERROR", *SECOND_DAY, "--json")
    assert (done.status, found(done)) == (0, [("logs/22", n) for n in (0, 50, 100, 150)])
    assert "1 log of 4 objects searched" in done.err
    assert downloads(network) == before + 1
    assert caf("logs", "search", "src", "logs/", "level: ERROR", "--from", "2024-01-01").out == b""
    assert downloads(network) == before + 1
    assert staged(caf) == []


def test_matches_are_printed_in_the_order_of_keys(caf):
    done = caf("logs", "search", "src", "logs/", "n >= 190", "--to", "2023-11-15T22:16:30")
    assert done.status == 0, done.err
    lines = done.out.decode().splitlines()
    assert [line[:9] for line in lines] == ["logs/21: "] * 10 + ["logs/22: "]
    assert lines[-1] == 'logs/22: {"ts":1700086590000,"level":"INFO","n":190}'


def test_a_log_without_times_is_always_searched(caf):
    done = caf(
        "logs", "search", "src", "untimed", "level: error", "--ignore-case", *SECOND_DAY, "--json"
    )
    assert (done.status, found(done)) == (0, [("untimed", 1.5), ("untimed", None)])
    assert "'untimed'" in done.err
    assert json.loads(done.out.splitlines()[1])["record"]["text"] == "\x9b31m\u2028"
    shown = caf("logs", "search", "src", "untimed", "text: *").out.decode().removesuffix("\n")
    assert shown.startswith("untimed: ")
    assert shown.isprintable()


def test_a_damaged_log_is_named_and_the_others_searched(caf):
    done = caf("logs", "search", "src", "damaged/", "n: 50", "--json")
    assert (done.status, found(done)) == (1, [("damaged/a", 50), ("damaged/d", 50)])
    crashed, malformed, *_, error = [line for line in done.err.splitlines() if "could not" in line]
    assert "'damaged/b'" in crashed
    assert "signal 6" in crashed
    assert "'damaged/c'" in malformed
    assert "2 logs of 4" in error
    assert staged(caf) == []


def test_lying_providers_spoil_no_search(caf, network):
    with opened_context(caf) as context:
        row = context.ledger.lookup.locate("src", "logs/23").row
    for number in range(len(network.provider_addresses)):
        network.misbehave(provider=number, flip_byte=row.start_byte + 500)
    done = caf("logs", "search", "src", "logs/2", "n: 50", "--json")
    for number in range(len(network.provider_addresses)):
        network.misbehave(provider=number)
    assert (done.status, found(done)) == (1, [("logs/21", 50), ("logs/22", 50)])
    assert "'logs/23'" in done.err


def test_headers_of_logs_without_recorded_times_are_read(caf):
    def record(value):
        with opened_context(caf) as context, connected(context.ledger.database) as connection:
            connection.execute("UPDATE caf_files SET has_log_times = %(value)s", {"value": value})

    record(False)
    try:
        done = caf("logs", "search", "src", "", "n: 50", *SECOND_DAY, "--json")
    finally:
        record(True)
    assert (done.status, found(done)) == (1, [("logs/22", 50)])
    assert (
        "3 logs of 9 objects searched; 9 headers read" in done.err
    )  # the log of the day, the one without times, and the damaged one


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["logs/", "level: ("], 2, ["clp-s refuses the query 'level: ('", "Parser error"]),
        (["logs/", ""], 2, ["clp-s refuses the query ''", "No query specified"]),
        (["logs/", "n: 1", "--from", "now"], 2, ["'now' is not a time"]),
        (
            ["logs/", "n: 1", "--from", "2023-11-15", "--to", "2023-11-14"],
            2,
            ["--to is before --from"],
        ),
    ],
)
def test_invalid_searches_are_one_sentence(caf, words, status, said):
    expect_error(caf("logs", "search", "src", *words), status, *said)


def test_a_query_is_never_an_option_of_clp_s(caf, tmp_path):
    done = caf("logs", "search", "src", "logs/21", "--", f"--path={tmp_path / 'out'}")
    assert (done.status, done.out) == (0, b""), done.err
    assert list(tmp_path.iterdir()) == []


def test_without_clp_s_one_sentence_says_how_to_install_it(caf, monkeypatch):
    monkeypatch.setitem(sys.modules, "yscope_clp_core", None)
    done = caf("logs", "search", "src", "logs/", "n: 1")
    expect_error(done, 3, "clp-s", "yscope-clp-core==", "'logs'")


# --- a clp-s that misbehaves


def a_program(folder: Path, searching: str) -> Path:
    """Make a clp-s that accepts every query; `searching` is the shell code of a search."""
    program = folder / "yscope_clp_core" / "bin" / "clp-s"
    program.parent.mkdir(parents=True)
    (folder / "yscope_clp_core" / "__init__.py").touch()
    program.write_text(
        '#!/bin/sh\ncase "$*" in *missing*) echo "[error] Failed to open archive" >&2; exit 1;; '
        f"esac\n{searching}\n"
    )
    program.chmod(0o700)
    return program


def test_clp_s_sees_no_secrets_and_works_in_private(caf, monkeypatch, tmp_path):
    program = a_program(tmp_path, 'env; ls -ld . "$3"')
    monkeypatch.setattr(log_search, "find_clp_s", lambda: program)
    done = caf("logs", "search", "src", "logs/21", "n: 1", AWS_SECRET_ACCESS_KEY="very secret")
    assert done.status == 0, done.err
    output = done.out.decode()
    assert "PATH=" in output
    assert not any(word in output for word in ("MNEMONIC", "AWS_", "CAF_", "very secret"))
    assert [line.split()[1] for line in output.splitlines()[-2:]] == ["drwx------", "-rw-------"]


def test_a_hanging_search_times_out_without_partial_records(caf, monkeypatch, tmp_path):
    program = a_program(tmp_path, "printf '{}\\n{\"half'; exec sleep 100")
    monkeypatch.setattr(log_search, "find_clp_s", lambda: program)
    done = caf("logs", "search", "src", "logs/21", "n: 1", "--timeout", "1")
    assert (done.status, done.out) == (1, b"logs/21: {}\n")
    assert "'logs/21'" in done.err
    assert "for 1 seconds" in done.err
    assert staged(caf) == []


@pytest.mark.thorough
def test_ctrl_c_ends_clp_s_and_removes_fetched_files(caf, tmp_path):
    a_program(tmp_path, f'echo $$ >"{tmp_path}/pid.$$"; exec sleep 100')
    process = caf.start("logs", "search", "src", "logs/", "n: 1", PYTHONPATH=str(tmp_path))
    while not (pids := list(tmp_path.glob("pid.*"))) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, err
    assert staged(caf) == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.suffix[1:]), 0)
