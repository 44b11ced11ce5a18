"""Evaluates sensor ticks like Dagster's daemon; a server that never answers."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dagster import build_sensor_context

from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.resources import build_resources
from caf_pipeline_tests.support.dagster_private import partition_loading_context


def evaluate_tick(pipeline, name: str, cursor: str | None = None, **options: Any):
    """Evaluate a sensor of the pipeline's settings; `options` are those of `build_defs`."""
    defs = build_defs(pipeline.settings, **options) if options else pipeline.defs
    with (
        partition_loading_context(dynamic_partitions_store=pipeline.instance),
        build_sensor_context(
            instance=pipeline.instance,
            definitions=defs,
            cursor=cursor,
            sensor_name=name,
            resources=build_resources(pipeline.settings),
        ) as context,
    ):
        return defs.resolve_sensor_def(name).evaluate_tick(context)


class SilentServer:
    """Accepts every connection and never answers. `asked` has the first bytes of each request."""

    def __init__(self, listening: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.asked: list[bytes] = []
        self.came = threading.Event()
        self._listening = listening
        self._open: list[socket.socket] = []

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._open.append(connection)
                self.asked.append(connection.recv(100))
                self.came.set()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        for connection in self._open:
            connection.close()


@contextmanager
def silent_server() -> Iterator[SilentServer]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = SilentServer(listening)
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.close()
            thread.join()
