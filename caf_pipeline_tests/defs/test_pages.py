"""Pages of the UI in a real browser."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.defs import evaluations
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.naming import ASSETS
from caf_pipeline.settings import StoreSettings
from caf_pipeline.system.quantities import show_size
from caf_pipeline_tests.support.browser import browser, needs_browser
from caf_pipeline_tests.support.dagster_daemon import ROOT, settings_of
from caf_pipeline_tests.support.free_ports import free_port
from caf_pipeline_tests.support.jackal_network import jackal_settings
from caf_pipeline_tests.support.ticks import evaluate_tick
from caf_pipeline_tests.support.ui_process import wait_for_webserver

pytest_plugins = [
    "caf_pipeline_tests.support.dagster_home",
    "caf_pipeline_tests.support.jackal_network",
]

SOURCE = "my-source"
PICTURES = os.environ.get("CAF_SCREENSHOTS")

FITS = (
    "return [...document.querySelectorAll('td')].every(cell => "
    "cell.getBoundingClientRect().right <= window.innerWidth)"
)
DRAWN = (
    "return [...document.images].some(one => one.alt === arguments[0] && one.naturalWidth > 100)"
)


@pytest.fixture
def archived(pipeline, network, new_bucket, monkeypatch):
    """A source on a Jackal network, archived by runs, proven, and observed at each tick."""
    monkeypatch.setattr(evaluations, "OBSERVE_SECONDS", 0)
    source = {
        "store": StoreSettings(kind="jackal"),
        "jackal": jackal_settings(network),
        "sources": {SOURCE: new_bucket.settings(target_size=6 << 20, public=True)},
    }
    pipeline = replace(pipeline, settings=pipeline.settings.model_copy(update=source))
    chosen = random.Random(11)
    for number in range(48):
        new_bucket.put(
            f"2024/06/IMG_{410 + number:04}.jpg",
            chosen.randbytes(int(chosen.lognormvariate(12, 1.2))),
        )
    new_bucket.put("2024/06/.keep", b"")
    chunks = pipeline.plan()
    evaluate_tick(pipeline, "caf_watch_sources")
    for chunk in chunks:
        assert pipeline.execute("caf_archive_my_source", partition_key=chunk).success
    evaluate_tick(pipeline, "caf_watch_sources")
    for job in ("caf_prove_my_source", "caf_storage_plan_my_source", "caf_audit_my_source"):
        assert pipeline.execute(job).success
    assert pipeline.chunks(ChunkState.DAMAGED) == []
    return pipeline


def lose_last_chunk(pipeline, network):
    """Delete the last chunk at every provider, and prove it."""
    lost = pipeline.chunks()[-1]
    # Chunks are looked at side by side. The chunk that was checked last is reported last.
    with closing(pipeline.run_context()) as context:
        prove_chunk(context, lost)
    for provider in range(len(network.providers)):
        network.delete_blob(provider, pipeline.ledger.chunks.get(lost).merkle_root)
    for job in ("caf_prove_my_source", "caf_audit_my_source"):
        assert pipeline.execute(job).success
    assert pipeline.chunks(ChunkState.DAMAGED) == [lost]


@contextmanager
def served(pipeline, folder: Path) -> Iterator[str]:
    """Run a webserver without the keys of the wallet; yield its address."""
    environment = settings_of(pipeline, folder)
    described = folder / "caf.toml"
    described.write_text(described.read_text().replace('kind = "directory"', 'kind = "jackal"'))
    address = f"127.0.0.1:{free_port()}"
    host, port = address.split(":")
    command = [
        Path(sys.executable).with_name("dagster-webserver"),
        "-h",
        host,
        "-p",
        port,
        "-w",
        ROOT / "workspace.yaml",
    ]
    log = folder / "webserver.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        wait_for_webserver(process, address, log)
        yield f"http://{address}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@needs_browser
@pytest.mark.thorough
def test_the_ui_shows_graph_chunk_failed_check_and_plots(archived, network, tmp_path):
    pictures = Path(PICTURES) if PICTURES else tmp_path
    chunks = archived.chunks()
    first = archived.ledger.chunks.get(chunks[0])
    with browser(tmp_path) as window, served(archived, tmp_path) as url:
        assets = f"{url}/assets/{SOURCE}"

        window.size(1800, 560)
        group = f"{url}/locations/caf-pipeline/asset-groups/my_source/lineage"
        shown = window.open(
            group, *ASSETS, f"{len(chunks)} partitions", "Materialized", "1 / 1 Passed"
        )
        assert (
            shown.count("100% filled"),
            shown.count("1 / 1 Passed"),
            shown.count("6 / 6 Passed"),
        ) == (3, 4, 1)
        window.picture(pictures / "asset-graph.png")

        window.size(1700, 1220)
        sizes = show_size(first.stored_size_bytes), f"{first.member_count}"
        page = f"{assets}/stored_chunk?view=partitions&partition={first.name}"
        window.open(
            page,
            *chunks,
            "Materialized",
            "verified",
            *sizes,
            first.merkle_root.hex(),
            first.owner,
            "curl -f",
        )
        window.picture(pictures / "chunk-page.png")

        lose_last_chunk(archived, network)
        window.size(1800, 560)
        shown = window.open(group, *ASSETS, "0 / 1 Passed")
        assert (
            shown.count("0 / 1 Passed") == 2
        )  # the lost chunk is not proven, and with it the source is not complete

        window.size(1500, 1000)
        page = f"{assets}/stored_chunk?view=checks&checkDetail=caf_chunk_is_proven"
        shown = window.open(page, "Failed", chunks[-1], "0 of 3 copies are right", "damaged")
        # In the description, and for each provider in the table.
        assert shown.count("have the file") == 6
        assert window.run(FITS)
        window.picture(pictures / "failed-check.png")

        window.size(1500, 2400)
        window.open(
            f"{assets}/chunk_plan?view=overview",
            "object_sizes",
            "Fails if more than 2 days since last materialization",
        )
        window.wait_until(DRAWN, "object sizes")
        window.picture(tmp_path / "plan.png")

        shown = window.open(
            f"{assets}/chunk_plan?view=checks&checkDetail=caf_storage_plan_lasts",
            "Plots",
            "days_left",
            "free_gib",
        )
        assert (shown.count("Succeeded"), shown.count("Not Evaluated")) == (6, 0)

        window.open(f"{assets}/s3_inventory?view=overview", "whole_source")
        window.click(
            "Plots",
            "archived_gib",
            "pending_objects",
            "skipped_objects",
            "oldest_pending_hours",
            "copies_faulty",
        )
        window.wait_until("return document.querySelectorAll('canvas').length >= arguments[0]", 10)
        window.picture(tmp_path / "source-plots.png")
