"""The benchmarks run: each case at a tiny scale. What they measure is nobody's business here."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report, scaling
from benchmarks.cases import CASES
from benchmarks.pairs import Command, Compared, Usage, compare

ROOT = Path(__file__).parents[1]

MISSING = [program for program in ("rclone", "openssl", "tar", "curl") if not shutil.which(program)]


def told_by(*command):
    """Return the lines that a benchmark prints, run as a module of Python."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def told_by_cases():
    """What each case tells, by name; all are measured by one process, which starts their servers
    once.
    """
    lines = told_by("benchmarks", "--scale", "tiny", "--pairs", "1")
    return {told["case"]: told for told in map(json.loads, lines)}


@pytest.mark.thorough
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize("case", CASES)
def test_a_case_tells_its_ratio_as_json(told_by_cases, case):
    told = told_by_cases[case]
    assert (told["scale"], told["pairs"]) == ("tiny", 1)
    assert told["ratio"] == pytest.approx(told["ours"]["seconds"] / told["theirs"]["seconds"])
    assert (
        min(
            told["ours"]["cpu_seconds"], told["theirs"]["cpu_seconds"], told["theirs"]["peak_bytes"]
        )
        > 0
    )
    served = case.startswith(
        ("packing", "journal", "report", "listing", "restore", "read-one", "read-large", "whole")
    )
    assert (told.get("server") in {"versitygw", "moto"}) == served


@pytest.mark.thorough
def test_workers_that_share_a_ledger_are_simulated():
    lines = told_by("benchmarks.workers", "--workers", "1", "5", "--chunks", "6", "--objects", "2")
    told = [json.loads(line) for line in lines]
    assert [(line["workers"], line["chunks"]) for line in told] == [(1, 6), (5, 6)]
    assert all(line["moves_per_second"] == pytest.approx(7 * 6 / line["seconds"]) for line in told)


@pytest.mark.thorough
def test_dagster_shows_all_chunks_of_a_ledger_as_partitions():
    lines = told_by("benchmarks.partitions", "--chunks", "30")
    [told] = [
        json.loads(line) for line in lines if line.startswith("{")
    ]  # the code server speaks, too
    assert (told["chunks"], min(told["seconds"].values()) >= 0) == (30, True)


@pytest.mark.thorough
def test_archives_of_other_programs_are_made_and_read():
    [told] = map(
        json.loads,
        told_by("benchmarks.formats", "--files", "50", "--inputs", "3", "--entries", "4"),
    )
    assert (told["files"], told["log_mb"]) == (50, 0.4)
    assert min(told["look_ups_a_second"], told["written_mb_a_second"], told["read_mb_a_second"]) > 0


@pytest.mark.thorough
def test_a_daemon_tells_what_its_runs_cost():
    arguments = ["--chunks", "2", "--puts", "0", "--storage", "sqlite", "--workers", "2"]
    [told, by_command] = map(json.loads, told_by("benchmarks.daemon", *arguments))
    assert (by_command["runs"], by_command["failed_runs"], by_command["workers"]) == (2, 0, 2)
    assert (told["chunks"], told["storage"], told["runs"], told["failed_runs"]) == (
        2,
        "sqlite",
        2,
        0,
    )
    assert (
        min(
            told["median_events_a_run"],
            told["storage_bytes_a_run"],
            told["runs_a_minute"],
            told["queued_a_second"],
        )
        > 0
    )


@pytest.mark.thorough
def test_a_case_tells_how_its_costs_grow():
    [told] = map(json.loads, told_by("benchmarks.slopes", "--scale", "tiny", "writer-small"))
    assert (told["case"], told["scale"], len(told["cpu_seconds"]), len(told["peak_bytes"])) == (
        "writer-small",
        "slopes-tiny",
        3,
        3,
    )


@pytest.mark.thorough
def test_a_case_that_there_is_not_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "nothing"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no case 'nothing'; there are writer-small, " in done.stderr


def test_a_command_that_fails_is_told_and_not_measured():
    with pytest.raises(SystemExit, match=r"sh -c 'echo sorry >&2; exit 3' failed:\nsorry"):
        compare(Command(["sh", "-c", "echo sorry >&2; exit 3"]), Command(["true"]), pairs=1)


def test_peak_memory_excludes_the_measuring_process():
    ballast = bytearray(100 << 20)
    ballast[:: 4 << 10] = b"x" * (len(ballast) // (4 << 10))
    found = compare(
        Command([sys.executable, "-c", "x = b'x' * (300 << 20)"]), Command(["true"]), pairs=1
    ).summary()
    assert found["ours"]["peak_bytes"] > 300 << 20
    assert found["theirs"]["peak_bytes"] < len(ballast) // 2


def test_figures_of_one_run_are_shown_beside_the_total():
    found = compare(Command(["echo", '{"p50_ms": 1.5}']), Command(["true"]), pairs=1).summary()
    assert (found["ours"]["p50_ms"], "p50_ms" in found["theirs"]) == (1.5, False)


def test_what_a_run_made_is_gone_before_the_next(tmp_path):
    made = tmp_path / "made"
    compare(
        Command(["mkdir", str(made)], removed=[made]),
        Command(["mkdir", str(made)], removed=[made]),
        pairs=2,
    )


def test_page_shows_the_newest_result_and_its_goal(tmp_path, monkeypatch):
    usage = [Usage(seconds, seconds, 1 << 20, ["true"]) for seconds in (1.0, 2.0, 4.0)]
    found = Compared(usage, usage[::-1]).summary()
    assert (found["ratio"], found["lowest"], found["highest"]) == (1.0, 0.25, 4.0)
    about = {
        "scale": "full",
        "at": "2026-11-22T00:00:00+00:00",
        "commit": "abc",
        "machine": "one of ours",
    }
    lines = [
        {
            "case": "writer-small",
            **found,
            "ratio": ratio,
            "goals": {"ratio": 1.0, "cpu_ratio": 3.0},
            **about,
        }
        for ratio in (3.0, 0.9)
    ] + [{"case": "upload", **found, "ratio": 1.2, "goals": {"ratio": 1.1}, **about}]
    history, page, plot = tmp_path / "history", tmp_path / "page", tmp_path / "plot"
    history.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "PAGE", page)
    monkeypatch.setattr(report, "PLOT", plot)
    report.write(history)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert re.search(r"\| writer-small \| .*\*\*0\.90\*\* .*\| 1\.0, CPU 3\.0: reached \|", text)
    assert re.search(r"\| upload \| .*\*\*1\.20\*\* .*\| 1\.1: not reached \|", text)
    assert plot.read_text().count("<rect") == 3


def test_the_model_names_the_slowest_stage_of_each_archive(tmp_path, monkeypatch):
    about = {
        "shares": [0.1, 0.4, 1.0],
        "cpu_seconds": [1.0, 4.0, 10.0],
        "peak_bytes": [1 << 20] * 3,
        "curve": 1.0,
    }
    slopes = [
        {
            "case": case,
            "scale": "slopes-full",
            "slope": slope,
            "seconds": [slope / 10, slope / 2.5, slope],
            **about,
        }
        for case, slope in (
            ("packing-small", 10.0),
            ("packing-large", 8.0),
            ("planning", 8.0),
            ("load-in-order", 50.0),
        )
    ]
    rates = {
        "chunks_per_second": 10.0,
        "moves_per_second": 70.0,
        "median_chunk_seconds": 1.0,
        "slowest_chunk_seconds": 2.0,
    }
    history, page = tmp_path / "history", tmp_path / "page"
    history.write_text(
        "".join(
            f"{json.dumps(line)}\n"
            for line in [*slopes, {"case": "workers", "scale": "s", "workers": 4, **rates}]
        )
    )
    page.write_text(f"{report.BEGIN}\n{report.END}\n")
    monkeypatch.setattr(scaling, "PAGE", page)
    scaling.write(history)
    text = page.read_text()
    assert "| CPU of a small object | 500 µs |" in text
    assert "| a location row | 10.0 µs |" in text
    # 10⁹ × 500 µs over 8 cores is 17 hours; 10⁹ GETs of 30 ms, 64 at a time, are 5.4 days
    assert re.search(
        r"10⁹ objects of 128 KiB \| 1 \| .* \| \*\*5\.4 days\*\*: GETs in flight", text
    )
    assert "| 4 | 10.0 | 70 | 1.00 | 2.00 |" in text
