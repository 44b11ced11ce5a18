"""One benchmark at a tiny scale, and the pages of results. `make bench-quick` runs all."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ledger_size, report, scaling
from benchmarks.bounds import BOUNDS
from benchmarks.cases import CASES
from benchmarks.pairs import Command, Comparison, Usage, compare

ROOT = Path(__file__).parents[1]

CASE = next(iter(CASES))


def run_benchmark(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_case_prints_its_ratio_as_json():
    process = run_benchmark("--scale", "tiny", "--pairs", "1", CASE)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert (result["case"], result["scale"], result["pairs"]) == (CASE, "tiny", 1)
    compared = CASES[CASE].ratio_of
    assert result["ratio"] == pytest.approx(result["ours"][compared] / result["theirs"][compared])
    assert (
        min(
            result["ours"]["cpu_seconds"],
            result["theirs"]["cpu_seconds"],
            result["theirs"]["peak_bytes"],
        )
        > 0
    )


@pytest.mark.thorough
def test_ledger_is_measured_at_two_sizes():
    process = run_benchmark("--scale", "tiny", ledger_size.NAME)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert list(result["operations"]) == list(ledger_size.GOALS)
    for name, costs in result["operations"].items():
        assert min(costs["cpu_seconds"]) > 0
        assert min(costs["pages"]) > 0 or "DuckDB" in name
    pages = result["operations"]["1,000 look-ups"]["pages"]
    assert pages[1] < ledger_size.FLAT * pages[0]


def test_the_page_names_the_bound_of_each_case():
    other_work = {
        f"{case.base} with latency"
        for case in CASES.values()
        if case.base in CASES and case.work != CASES[case.base].work
    }
    assert set(BOUNDS) == {name for name, case in CASES.items() if not case.base} | other_work


@pytest.mark.thorough
def test_unknown_case_is_named():
    process = run_benchmark("nothing")
    assert (process.returncode, process.stdout) == (2, "")
    assert "'nothing'" in process.stderr


def test_failed_command_is_not_measured():
    with pytest.raises(SystemExit, match=r"exit 3.*\nsorry"):
        compare(Command(["sh", "-c", "echo sorry >&2; exit 3"]), Command(["true"]), pairs=1)


def test_peak_memory_excludes_the_measuring_process():
    ballast = bytearray(100 << 20)
    ballast[:: 4 << 10] = b"x" * (len(ballast) // (4 << 10))
    summary = compare(
        Command([sys.executable, "-c", "x = b'x' * (300 << 20)"]), Command(["true"]), pairs=1
    ).summary()
    assert summary["ours"]["peak_bytes"] > 300 << 20
    assert summary["theirs"]["peak_bytes"] < len(ballast) // 2


def test_median_of_repeated_operations_is_reported():
    summary = compare(Command(["echo", '{"p50_ms": 1.5}']), Command(["true"]), pairs=1).summary()
    assert (summary["ours"]["p50_ms"], "p50_ms" in summary["theirs"]) == (1.5, False)


def test_outputs_are_removed_before_the_next_run(tmp_path):
    output = tmp_path / "output"
    compare(
        Command(["mkdir", str(output)], removed=[output]),
        Command(["mkdir", str(output)], removed=[output]),
        pairs=2,
    )


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes the page and the plot of a history's lines."""
    history, page, plot = tmp_path / "history", tmp_path / "page", tmp_path / "plot"
    monkeypatch.setattr(report, "PAGE", page)
    monkeypatch.setattr(report, "PLOT", plot)

    def write(lines):
        history.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
        report.write(history)
        return page.read_text(), plot.read_text()

    return write


def test_page_shows_the_newest_result_and_its_goal(written):
    usage = [Usage(seconds, seconds, 1 << 20, ["true"]) for seconds in (1.0, 2.0, 4.0)]
    summary = Comparison(usage, usage[::-1]).summary()
    assert (summary["ratio"], summary["lowest"], summary["highest"]) == (1.0, 0.25, 4.0)
    about = {
        "scale": "full",
        "at": "2026-11-22T00:00:00+00:00",
        "commit": "abc",
        "machine": "a machine",
    }
    lines = [
        {
            "case": "writer-small",
            **summary,
            "ratio": ratio,
            "goals": {"ratio": 1.0, "cpu_ratio": 3.0},
            **about,
        }
        for ratio in (3.0, 0.9)
    ] + [{"case": "upload", **summary, "ratio": 1.2, "goals": {"ratio": 1.1}, **about}]
    text, plot = written(lines)
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert re.search(r"\| writer-small \| .*\*\*0\.90\*\* .*\| 1\.0, CPU 3\.0: reached \|", text)
    assert re.search(r"\| upload \| .*\*\*1\.20\*\* .*\| 1\.1: not reached \|", text)
    assert plot.count("<rect") == 3


def test_page_compares_latencies_side_by_side(written):
    usage = [Usage(2.0, 1.0, 1 << 20, ["true"])]
    summary = Comparison(usage, usage).summary()
    about = {"scale": "full", "at": "2026-11-22T00:00:00+00:00", "commit": "a", "machine": "b"}
    lines = [
        {"case": case, **summary, "ratio": ratio, "goals": goals, **about}
        for case, ratio, goals in (
            ("get-one", 0.5, {}),
            ("get-one-30ms", 0.75, {"ratio": 1.0}),
            ("get-one-100ms", 1.25, {}),
        )
    ]
    text, plot = written(lines)
    assert re.search(r"\| get-one \| .*0\.50.* \| .*0\.75.* \| .*1\.25.* \| .*1\.0: reached", text)
    assert text.count("get-one-") == 0
    assert plot.count("<rect") == 4


def test_page_compares_the_ledgers_sizes_with_the_first(written):
    usage = [Usage(1.0, 1.0, 1 << 20, ["true"])]
    about = {"scale": "full", "at": "2026-11-29T00:00:00+00:00", "commit": "a", "machine": "b"}
    case = {"case": "upload", **Comparison(usage, usage).summary(), "goals": {}, **about}
    sizes = [
        {
            "case": ledger_size.NAME,
            **about,
            "rows": [2_000_000, 20_000_000],
            "chunks": 100,
            "row_bytes": [416.0, 416.0],
            "operations": {
                "`caf backup`": {
                    "pages": [10, pages],
                    "cpu_seconds": [1.0, 8.0],
                    "peak_bytes": [1 << 20, 2 << 20],
                }
            },
        }
        for pages in (200, 100)
    ]
    text, _ = written([case, *sizes])
    assert "| `caf backup` | 10, 100 | **10.00** | 1.00, 8.00 | **8.00** | 1, 2 |" in text
    assert "| 11: reached | 20.00, 8.00 |" in text


def test_scaling_page_names_the_slowest_stage(tmp_path, monkeypatch):
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
    # 10⁹ GETs of 30 ms, 256 at a time, take 33 hours. Three copies of the bytes take 3.6 days.
    assert re.search(r"10⁹ objects of 128 KiB \| 1 \| .* \| \*\*3\.6 days\*\*: network out", text)
    assert "| 4 | 10.0 | 70 | 1.00 | 2.00 |" in text
