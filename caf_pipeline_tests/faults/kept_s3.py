"""An S3 server that survives kills: moto's, with a log of all changes.

A change is in the log before the answer. A restarted server repeats all changes before it opens its
port, so no client sees it without its objects. `python -m caf_pipeline_tests.faults.kept_s3 FILE
PORT` is the server; it prints its port.
"""

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Self

from caf_pipeline_tests.support.s3_server import Bucket, make_bucket

_CHANGES: Final = ("PUT", "POST", "DELETE")
_ANY_PORT: Final = 0

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class KeptS3:
    """The server as a process.

    Attributes:
        endpoint: its address, which a kill does not change.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "changes"
        self._port = _ANY_PORT
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it with its old objects; return when it answers."""
        command = [
            sys.executable,
            "-m",
            "caf_pipeline_tests.faults.kept_s3",
            str(self._file),
            str(self._port),
        ]
        with open(self._file.with_name("log"), "ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout
        self._port = int(self._process.stdout.readline())

    def kill(self) -> None:
        """Kill it by SIGKILL, if it runs."""
        if self._process:
            assert self._process.stdout
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None

    def make_bucket(self) -> Bucket:
        return make_bucket(self.endpoint)


# --- the server -----------------------------------------------------------------------------------


def _kept(application: Application, file: Path) -> Application:
    """Return an application that logs each change before making it."""

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in _CHANGES:
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(body)
            plain = {name: value for name, value in environ.items() if isinstance(value, str)}
            with file.open("ab") as out:
                out.write(pickle.dumps((plain, body)))
        return application(environ, start_response)

    return serve


def _changes(file: Path) -> Iterator[tuple[dict[str, str], bytes]]:
    """Yield the logged changes. A kill may have cut the last one, which was never answered."""
    if not file.exists():
        return
    with file.open("rb") as kept:
        while True:
            try:
                yield pickle.load(kept)
            except (EOFError, pickle.UnpicklingError):
                return


def main() -> None:
    """Serve until killed."""
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server
    from werkzeug.test import run_wsgi_app

    file, port = Path(sys.argv[1]), int(sys.argv[2])
    moto = DomainDispatcherApplication(create_backend_app)
    for plain, body in _changes(file):
        stream = {
            "wsgi.input": io.BytesIO(body),
            "wsgi.errors": sys.stderr,
            "wsgi.version": (1, 0),
            "wsgi.multithread": True,
        }
        run_wsgi_app(moto, plain | stream, buffered=True)
    server = make_server(
        "127.0.0.1", port, _kept(moto, file), threaded=True, request_handler=MotoRequestHandler
    )
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    os.environ.setdefault("MOTO_PORT", sys.argv[2])
    main()
