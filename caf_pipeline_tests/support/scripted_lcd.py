"""A chain node's REST server with scripted answers, including wrong ones.

The loopback network is the strict one.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

CHAIN_ID = "scripted-1"


@dataclass(frozen=True)
class ScriptedAnswer:
    """An answer.

    `body` is JSON unless it is bytes. `cut` cuts the connection after so many bytes.
    """

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None

    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


NOT_FOUND = ScriptedAnswer(
    {"code": 5, "message": "rpc error: code = NotFound desc = not found", "details": []}, 404
)
NOT_IMPLEMENTED = ScriptedAnswer({"code": 12, "message": "Not Implemented", "details": []}, 501)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Some tests expect clients that leave in the middle of an answer."""


class ScriptedLcd:
    """A node at `height` that also answers the paths in `answers`, without the module's prefix.

    `asked` collects the requested paths.
    """

    def __init__(self) -> None:
        self.height = 100
        self.chain_id = CHAIN_ID
        self.age = 0.0
        self.block_seconds = 1.0
        self.answers: dict[str, ScriptedAnswer | Callable[[dict[str, str]], ScriptedAnswer]] = {}
        self.asked: list[str] = []
        node = self

        class Handler(BaseHTTPRequestHandler):
            # head and body are two writes: the second would wait 40 ms for an acknowledgement
            disable_nagle_algorithm = True
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                split = urlsplit(self.path)
                node._answer(
                    self,
                    unquote(split.path),
                    {name: values[0] for name, values in parse_qs(split.query).items()},
                )

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def block(self, height: int) -> ScriptedAnswer:
        time = datetime.now(UTC) - timedelta(
            seconds=self.age + (self.height - height) * self.block_seconds
        )
        header = {
            "chain_id": self.chain_id,
            "height": str(height),
            "time": f"{time:%Y-%m-%dT%H:%M:%S.%f}123Z",
        }
        return ScriptedAnswer({"block": {"header": header}})

    def _answer(self, handler: BaseHTTPRequestHandler, path: str, params: dict[str, str]) -> None:
        name = path.removeprefix("/jackal/canine-chain/storage/").removeprefix(
            "/cosmos/base/tendermint/v1beta1/"
        )
        self.asked.append(
            name + (f"?{params['pagination.key']}" if "pagination.key" in params else "")
        )
        reply = self.answers.get(name)
        if reply is None:
            reply = self._of_itself(name)
        if callable(reply):
            reply = reply(params)
        content = reply.content()
        handler.send_response(reply.status)
        for header, value in (
            {"Content-Type": "application/json", "Content-Length": str(len(content))}
            | reply.headers
        ).items():
            handler.send_header(header, value)
        handler.end_headers()
        handler.wfile.write(content[: reply.cut])
        if reply.cut is not None:
            handler.close_connection = True

    def _of_itself(self, name: str) -> ScriptedAnswer:
        if name == "node_info":
            return ScriptedAnswer({"default_node_info": {"network": self.chain_id}})
        if name == "blocks/latest":
            return self.block(self.height)
        if name.startswith("blocks/"):
            return self.block(int(name.removeprefix("blocks/")))
        return NOT_IMPLEMENTED
