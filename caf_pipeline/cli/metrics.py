"""`caf metrics`: the ledger's sums as OpenMetrics, printed or served.

Nothing is counted in a process: a crash loses no count.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any

import typer
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from caf_pipeline.cli.opened_ledger import opened_ledger
from caf_pipeline.cli.terminal import note
from caf_pipeline.errors import CafError, UsageError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.settings import load_settings


def metrics(
    serve: Annotated[
        str | None,
        typer.Option(
            "--serve",
            metavar="HOST:PORT",
            help="Answer GET /metrics there until it is interrupted.",
        ),
    ] = None,
) -> None:
    r"""Print the numbers of each source as OpenMetrics.

    Prometheus reads them, and whatever reads its format.

    Chunks, objects and bytes by state, skipped objects, copies, suspected chunks, attempts, the
    oldest chunk under way, the last change, the last whole inventory, the last look at a stored
    chunk, the last whole pass through the chain's lists, keys that events named, a pause. The
    ledger is asked for each number when it is shown, so that it is right also after a crash, and
    the same on every machine. deploy/grafana has a dashboard.

    With --serve a scrape while the database is away is answered with status 503. Everybody who
    reaches HOST:PORT can read the names of the sources and these numbers; nothing else is shown.

    \b
    Examples:
      caf metrics > /var/lib/node_exporter/caf.prom
      caf metrics --serve 127.0.0.1:9180

    Exit status: 0; 2 HOST:PORT cannot be listened on; 3 a setting is wrong; 6 the database failed;
    130 interrupted by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP or a closed terminal, which end
    --serve.
    """
    with opened_ledger(load_settings()) as ledger:
        if serve is not None:
            _serve(*_host_and_port(serve), ledger)
        else:
            sys.stdout.write(render(ledger).decode())


def render(ledger: Ledger) -> bytes:
    """Return all metrics, as OpenMetrics text."""
    text: bytes = generate_latest(_registry(ledger))  # type: ignore[no-untyped-call]
    return text


def _registry(ledger: Ledger) -> CollectorRegistry:

    class LedgerCollector(Collector):
        def collect(self) -> Iterable[Metric]:
            return families(ledger)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerCollector())
    return registry


def families(ledger: Ledger) -> Iterator[Metric]:
    """Yield every metric with its samples."""
    sources = ledger.lookup.sources()
    found = ledger.progress.of(sources)
    chunks = GaugeMetricFamily("caf_chunks", "Chunks, by state.", labels=["source", "state"])
    objects = GaugeMetricFamily(
        "caf_objects", "Objects in chunks, by the chunk's state.", labels=["source", "state"]
    )
    sizes = GaugeMetricFamily(
        "caf_object_bytes",
        "Bytes of objects in chunks, by the chunk's state.",
        labels=["source", "state"],
    )
    for one in found:
        for state, sums in sorted(one.states.items()):
            chunks.add_metric([one.source, state], sums.chunks)
            objects.add_metric([one.source, state], sums.objects)
            sizes.add_metric([one.source, state], sums.size_bytes)
    yield from (chunks, objects, sizes)

    def gauge(name: str, said: str, value: Callable[[Any], int | datetime | None]) -> Metric:
        family = GaugeMetricFamily(name, said, labels=["source"])
        for one in found:
            if (number := value(one)) is not None:
                family.add_metric(
                    [one.source], number.timestamp() if isinstance(number, datetime) else number
                )
        return family

    yield gauge(
        "caf_skipped_objects",
        "Objects that were skipped, with their reason in the ledger.",
        lambda one: one.skipped_objects,
    )
    yield gauge(
        "caf_noticed_keys",
        "Keys that events named and no inventory has listed since.",
        lambda one: one.noticed_keys,
    )
    yield gauge(
        "caf_messages_set_apart",
        "Messages of the source's queue that are not events.",
        lambda one: one.messages_set_apart,
    )
    oldest = "When the oldest chunk under way was planned; absent where none is."
    yield gauge("caf_oldest_pending_timestamp_seconds", oldest, lambda one: one.oldest_planned_at)
    moved = (
        "When a chunk last moved on; planning it, or an attempt to pack it, is no move. "
        "Absent "
        "where none ever did."
    )
    yield gauge("caf_last_change_timestamp_seconds", moved, lambda one: one.moved_at)
    inventory = "When the last whole inventory that is planned was taken."
    yield gauge("caf_last_inventory_timestamp_seconds", inventory, lambda one: one.inventory_at)
    attempts = CounterMetricFamily(
        "caf_packing_attempts", "How often packing a chunk was begun.", labels=["source"]
    )
    for one in found:
        attempts.add_metric([one.source], one.attempts)
    yield attempts
    copies = GaugeMetricFamily(
        "caf_copies", "Copies of archived chunks, as last looked at.", labels=["source", "status"]
    )
    for (source, status), count in sorted(ledger.progress.copy_counts(sources).items()):
        copies.add_metric([source, status], count)
    yield copies
    suspected = (
        "Located chunks of which the chain's lists say something amiss, and that were not "
        "looked at since."
    )
    yield gauge("caf_suspected_chunks", suspected, lambda one: one.suspected_chunks)
    said = (
        "When the last pass began that went through all of the store's lists; absent where "
        "none "
        "ever did."
    )
    looked = "When the proof watch last looked at a located chunk; absent where it never did."
    yield gauge("caf_last_look_timestamp_seconds", looked, lambda one: one.looked_at)
    looks = GaugeMetricFamily("caf_last_whole_bulk_look_timestamp_seconds", said, labels=["store"])
    for store, at in sorted(ledger.chain_listings.whole().items()):
        looks.add_metric([store], at.timestamp())
    yield looks
    readings: list[tuple[str, str, Callable[[Any], int | datetime | None]]] = [
        (
            "plan_end_timestamp_seconds",
            "When the bought space ends; absent without a plan.",
            lambda row: row.ends_at,
        ),
        ("space_bytes", "Space that was bought.", lambda row: row.space_bytes),
        ("used_bytes", "Space that is used, every copy counted.", lambda row: row.used_bytes),
        ("balance_ujkl", "Coins of the wallet.", lambda row: row.balance),
        (
            "plan_read_timestamp_seconds",
            "When the plan and the balance were last read, by the chain.",
            lambda row: row.read_at,
        ),
    ]
    plans = ledger.storage_plans.list()
    for name, text, read in readings:
        of_account = GaugeMetricFamily(f"caf_jackal_{name}", text, labels=["account"])
        for row in plans:
            if (number := read(row)) is not None:
                of_account.add_metric(
                    [row.account], number.timestamp() if isinstance(number, datetime) else number
                )
        yield of_account
    paused = bool(ledger.controls.current().paused)
    yield GaugeMetricFamily(
        "caf_paused", "Whether an operator has everything paused.", value=int(paused)
    )


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    with suppress(ValueError):
        if host and 0 <= int(port) < 1 << 16:
            return host.strip("[]"), int(port)
    raise UsageError(f"{text!r} is not HOST:PORT.", hint="For example 127.0.0.1:9180.")


def _serve(host: str, port: int, ledger: Ledger) -> None:
    """Answer scrapes until it is interrupted; says on standard error where it listens."""
    try:
        server, thread = start_http_server(port, host, _registry(ledger))
    except OSError as error:
        raise UsageError(f"{host}:{port} cannot be listened on: {error.strerror}.") from error
    answer: Any = server.get_app()

    def answer_or_refuse(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        try:
            pieces: Iterable[bytes] = answer(environ, start)
        except CafError as error:  # the library would print a traceback and answer 500
            start("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            pieces = [f"{error}\n".encode()]
        return pieces

    server.set_app(answer_or_refuse)
    note(f"metrics at http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics")
    try:
        thread.join()
    finally:
        server.shutdown()
        server.server_close()
