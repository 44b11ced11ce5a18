"""`caf metrics`: sums from the ledger for Prometheus."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Annotated, Any, Final

import typer
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from caf_pipeline.cli.opening import opened_ledger
from caf_pipeline.cli.terminal import note
from caf_pipeline.errors import CafError, UsageError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import SourceProgress
from caf_pipeline.records import StoragePlanRow
from caf_pipeline.settings import load_settings
from caf_pipeline.store.jackal.storage_forecast import warns_from


def metrics(
    serve: Annotated[
        str | None,
        typer.Option(
            "--serve",
            metavar="HOST:PORT",
            help="Answer GET /metrics until interrupted.",
        ),
    ] = None,
) -> None:
    r"""Print the numbers of each source for Prometheus.

    docs/reference/metrics.md lists the metrics. All come from the ledger, so they are the same on
    every machine with the same jackal.warn_days. deploy/grafana has a dashboard for Prometheus.

    They are printed in Prometheus' text format. --serve also speaks OpenMetrics, and answers with
    status 503 while the database is unreachable. Anybody who reaches HOST:PORT can read the
    sources' names and these numbers, but nothing else.

    \b
    Examples:
      D=/var/lib/node_exporter; caf metrics > $D/caf.new && mv $D/caf.new $D/caf.prom
      caf metrics --serve 127.0.0.1:9180

    \b
    Exit status: 0, 3, 6
      2  Listening on HOST:PORT failed.
      130, 143, 129: --serve was ended by Ctrl-C, SIGTERM, or SIGHUP.
    """
    settings = load_settings()
    warn_days = settings.jackal.warn_days
    with opened_ledger(settings) as ledger:
        if serve is not None:
            _serve(serve, ledger, warn_days)
        else:
            sys.stdout.write(render(ledger, warn_days).decode())


def render(ledger: Ledger, warn_days: int) -> bytes:
    """Return all metrics in Prometheus' text format."""
    return generate_latest(_registry(ledger, warn_days))


def _registry(ledger: Ledger, warn_days: int) -> CollectorRegistry:
    class LedgerCollector(Collector):
        def collect(self) -> Iterable[Metric]:
            return families(ledger, warn_days)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerCollector())
    return registry


_Value = int | datetime | None

_SOURCE_GAUGES: Final[Sequence[tuple[str, str, Callable[[SourceProgress], _Value]]]] = (
    (
        "caf_skipped_objects",
        "Objects that were skipped, with their reason in the ledger.",
        lambda progress: progress.skipped_objects,
    ),
    (
        "caf_packed_objects",
        "Objects that live runs have packed of their chunks.",
        lambda progress: progress.live.packed_objects,
    ),
    (
        "caf_packed_bytes",
        "Bytes that live runs have packed of their chunks.",
        lambda progress: progress.live.packed_bytes,
    ),
    (
        "caf_sent_bytes",
        "Bytes that live runs have sent of their chunks; every copy counts.",
        lambda progress: progress.live.sent_bytes,
    ),
    (
        "caf_noticed_keys",
        "Keys that events named and no inventory has listed since.",
        lambda progress: progress.noticed_keys,
    ),
    (
        "caf_messages_set_apart",
        "Messages of the source's queue that are not events.",
        lambda progress: progress.messages_set_apart,
    ),
    (
        "caf_oldest_pending_timestamp_seconds",
        "When the oldest chunk under way was planned; absent if none is under way.",
        lambda progress: progress.oldest_planned_at,
    ),
    (
        "caf_last_change_timestamp_seconds",
        "When a chunk last changed its state. Planning and attempts to pack do not count.",
        lambda progress: progress.moved_at,
    ),
    (
        "caf_last_inventory_timestamp_seconds",
        "When the last complete and planned inventory was taken.",
        lambda progress: progress.inventory_at,
    ),
    (
        "caf_suspected_chunks",
        "Located chunks that the chain's lists show as suspicious, not checked since.",
        lambda progress: progress.suspected_chunks,
    ),
    (
        "caf_last_look_timestamp_seconds",
        "When the proof watch last checked a located chunk; absent if never.",
        lambda progress: progress.looked_at,
    ),
)

_ACCOUNT_GAUGES: Final[Sequence[tuple[str, str, Callable[[StoragePlanRow], _Value]]]] = (
    (
        "caf_jackal_plan_end_timestamp_seconds",
        "When the bought space ends; absent without a plan.",
        lambda row: row.ends_at,
    ),
    ("caf_jackal_space_bytes", "Bought space.", lambda row: row.space_bytes),
    ("caf_jackal_used_bytes", "Used space; every copy counts.", lambda row: row.used_bytes),
    ("caf_jackal_balance_ujkl", "Coins of the wallet.", lambda row: row.balance),
    (
        "caf_jackal_plan_read_timestamp_seconds",
        "Chain time at which the plan and the balance were last read.",
        lambda row: row.read_at,
    ),
)


def families(ledger: Ledger, warn_days: int) -> Iterator[Metric]:
    """Yield all metrics with their samples."""
    names = ledger.lookup.sources()
    sources = ledger.progress.of(names)
    states = ["source", "state"]
    chunks = GaugeMetricFamily("caf_chunks", "Chunks, by state.", labels=states)
    objects = GaugeMetricFamily(
        "caf_objects", "Objects in chunks, by the chunk's state.", labels=states
    )
    sizes = GaugeMetricFamily(
        "caf_object_bytes", "Bytes of objects in chunks, by the chunk's state.", labels=states
    )
    attempts = CounterMetricFamily(
        "caf_packing_attempts", "Attempts to pack a chunk.", labels=["source"]
    )
    for progress in sources:
        for state, sums in sorted(progress.states.items()):
            chunks.add_metric([progress.source, state], sums.chunks)
            objects.add_metric([progress.source, state], sums.objects)
            sizes.add_metric([progress.source, state], sums.size_bytes)
        attempts.add_metric([progress.source], progress.attempts)
    yield from (chunks, objects, sizes, attempts)
    for name, description, value in _SOURCE_GAUGES:
        yield _gauge(name, description, "source", [(row.source, value(row)) for row in sources])
    copies = GaugeMetricFamily(
        "caf_copies", "Copies of archived chunks, when last checked.", labels=["source", "status"]
    )
    for (source, status), count in sorted(ledger.progress.copy_counts(names).items()):
        copies.add_metric([source, status], count)
    yield copies
    yield _gauge(
        "caf_last_whole_bulk_look_timestamp_seconds",
        "When the last complete pass over the store's lists began; absent if never.",
        "store",
        sorted(ledger.chain_listings.whole().items()),
    )
    plans = ledger.storage_plans.list()
    for name, description, reading in _ACCOUNT_GAUGES:
        yield _gauge(name, description, "account", [(row.account, reading(row)) for row in plans])
    yield _gauge(
        "caf_jackal_space_warning_timestamp_seconds",
        "When warnings about the end of the bought space begin; absent if no plan was ever read.",
        "account",
        [(row.account, warns_from(row, warn_days)) for row in plans],
    )
    yield GaugeMetricFamily(
        "caf_paused",
        "Whether an operator has paused everything.",
        value=int(bool(ledger.controls.current().paused)),
    )


def _gauge(name: str, description: str, label: str, values: Iterable[tuple[str, _Value]]) -> Metric:
    """None has no sample; times are seconds since 1970."""
    family = GaugeMetricFamily(name, description, labels=[label])
    for label_value, value in values:
        if value is not None:
            number = value.timestamp() if isinstance(value, datetime) else value
            family.add_metric([label_value], number)
    return family


def _serve(address: str, ledger: Ledger, warn_days: int) -> None:
    host, _, port_text = address.rpartition(":")
    host, port = host.strip("[]"), int(port_text) if port_text.isdecimal() else -1
    if not host or not 0 <= port < 1 << 16:
        raise UsageError(f"{address!r} is not HOST:PORT.", hint="For example 127.0.0.1:9180.")
    try:
        server, thread = start_http_server(port, host, _registry(ledger, warn_days))
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
