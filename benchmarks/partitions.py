"""Measure Dagster with many chunks as partitions.

`python -m benchmarks.partitions --chunks 100000` measures how long Dagster takes to register the
partitions, to answer the queries of the asset's page, and to evaluate ticks. Dagster keeps its
state in SQLite, the ledger is a real Postgres, and a code server has the definitions, as under
`dagster dev`.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagster import DagsterInstance, Definitions

from benchmarks import report
from benchmarks.inputs import KEPT
from caf_pipeline.dagster_host import backfill
from caf_pipeline.dagster_host.code_location import code_location
from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.partitions import register_chunks
from caf_pipeline.ledger.database import Database, embedded_url
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.sql_files import make_tables
from caf_pipeline.naming import ALERT_SENSOR, LAUNCH_SENSOR, partitions_name
from caf_pipeline.run_context import address_of
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.ticks import evaluate_tick
from caf_pipeline_tests.support.webserver import webserver

SOURCE = "bench"
SETTINGS = f"""home = "{{home}}"
[store]
kind = "directory"
folder = "{{home}}/store"
[sources.{SOURCE}]
bucket = "bench"
public = true
"""
PLANNED = """
    WITH source AS (
        INSERT INTO sources (name, archive_id, address)
        VALUES (%(source)s, 'bench', %(address)s)
        RETURNING source_id
    ), plan AS (
        INSERT INTO plans (
            source_id, name, sha256, snapshot, folder, object_count, object_bytes)
        SELECT source_id, '00000000', '\\x00', 'snapshot', 'folder', %(count)s, %(count)s
        FROM source
        RETURNING source_id, plan_id
    )
    INSERT INTO caf_files (
        name, source_id, plan_id, number, object_count, object_bytes, expected_size_bytes)
    SELECT %(source)s || '-00000000-' || lpad(number::text, 6, '0'),
        source_id, plan_id, number, 1, 1, 1
    FROM plan, generate_series(1, %(count)s) AS number
"""
# The queries of an asset's page: the bar of partitions, and the list to choose a partition from.
STATUSES = """
query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
    assetPartitionStatuses { ... on DefaultPartitionStatuses {
        materializedPartitions failedPartitions unmaterializedPartitions } } } } }"""
KEYS = """
query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
    partitionKeysByDimension { name partitionKeys } } } }"""


@dataclass(frozen=True)
class TickContext:
    """The arguments that `evaluate_tick` needs for a sensor."""

    settings: Settings
    instance: DagsterInstance
    defs: Definitions


def measure(count: int) -> dict[str, Any]:
    """Return the seconds that each step took."""
    seconds: dict[str, float] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = step()
        seconds[name] = round(time.perf_counter() - started, 2)
        return result

    KEPT.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=KEPT) as folder,
        _ledger(Path(folder).resolve()) as (ledger, database),
    ):
        (Path(folder) / "dagster").mkdir()
        with DagsterInstance.from_config(str(Path(folder) / "dagster")) as instance:
            with connected(database) as connection:
                address = address_of(load_settings().sources[SOURCE])
                connection.execute(PLANNED, {"source": SOURCE, "count": count, "address": address})
            assert timed("registered", lambda: register_chunks(instance, ledger, SOURCE)) == count
            assert timed("looked at again", lambda: register_chunks(instance, ledger, SOURCE)) == 0
            assert len(instance.get_dynamic_partitions(partitions_name(SOURCE))) == count
            with webserver(instance) as server:
                key = {"path": [SOURCE, "caf_chunk"]}
                for name, query in (("bar of partitions", STATUSES), ("list of partitions", KEYS)):
                    timed(f"{name}, first", lambda query=query: server.ask(query, key=key))
                    answer = timed(name, lambda query=query: server.ask(query, key=key))
                    assert json.dumps(answer).count(f'"{SOURCE}-00000000-') == count
            settings = load_settings()
            context = TickContext(settings, instance, build_defs(settings))
            for name in (ALERT_SENSOR, LAUNCH_SENSOR):
                # The first tick loads the definitions, which a code server has loaded before.
                evaluate_tick(context, name)
                timed(f"tick of {name}", lambda name=name: evaluate_tick(context, name))
            names = [chunk.name for chunk in ledger.chunks.list(SOURCE)]
            timed(
                "backfill submitted",
                lambda: backfill.submit(
                    context.settings,
                    instance,
                    ledger,
                    SOURCE,
                    names,
                    "all",
                    code_location(context.settings, [SOURCE]),
                ),
            )
            timed(
                f"tick of {LAUNCH_SENSOR}, beside it", lambda: evaluate_tick(context, LAUNCH_SENSOR)
            )
    return {"chunks": count, "seconds": seconds, **report.about()}


@contextmanager
def _ledger(home: Path) -> Iterator[tuple[Ledger, Database]]:
    (home / "caf.toml").write_text(SETTINGS.format(home=home), encoding="utf-8")
    url = embedded_url(Settings(home=home))
    os.environ |= {"CAF_CONFIG": str(home / "caf.toml"), "CAF_DATABASE_URL": url}
    database = Database(url)
    ledger = Ledger(database)
    try:
        with database.connect() as connection:
            make_tables(connection)
        yield ledger, database
    finally:
        ledger.close()
        embedded_server(home / "postgres").close()


def main() -> None:
    """Print the results as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partitions", description=__doc__)
    parser.add_argument("--chunks", type=int, default=100_000, help="number of partitions")
    print(json.dumps(measure(parser.parse_args().chunks)))


if __name__ == "__main__":
    main()
