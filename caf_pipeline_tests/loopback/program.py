"""The whole network: folders, ports, threads."""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from caf_pipeline_tests.loopback.blobs import BlobStore
from caf_pipeline_tests.loopback.blocks import Chain
from caf_pipeline_tests.loopback.chain_state import Database, Holding
from caf_pipeline_tests.loopback.control import PREFIX as CONTROL_PREFIX
from caf_pipeline_tests.loopback.control import Control
from caf_pipeline_tests.loopback.http_server import Listener, Request
from caf_pipeline_tests.loopback.lcd import Node
from caf_pipeline_tests.loopback.misbehaviour import Orders
from caf_pipeline_tests.loopback.options import Options
from caf_pipeline_tests.loopback.provider import Provider
from caf_pipeline_tests.loopback.transactions import encode_address

PORTS: Final = "ports.json"
DATABASE: Final = "chain.sqlite"


def provider_address(index: int) -> str:
    """Return a provider's address. It is the same in every network and belongs to no wallet."""
    return encode_address(hashlib.sha256(b"loopback provider %d" % index).digest()[:20])


class Program:
    """A network that runs from `start` to `stop`."""

    def __init__(self, folder: Path, options: Options) -> None:
        self._folder = folder
        self._options = options
        self._database = Database(folder / DATABASE)
        self._orders = Orders(self._database)
        self._addresses = [provider_address(index) for index in range(options.providers)]
        blobs = {
            address: BlobStore(folder / f"provider-{index}")
            for index, address in enumerate(self._addresses)
        }
        self._chain = Chain(options, self._database, self._orders, partial(self._can_prove, blobs))
        self._chain.purge = lambda holding: blobs[holding.provider].delete(holding.root)
        self._providers = [
            Provider(index, address, self._chain, blobs[address])
            for index, address in enumerate(self._addresses)
        ]
        self._provider_urls: dict[str, str] = {}
        self._control = Control(self._chain, self._providers, self._provider_urls)

    def _can_prove(self, blobs: dict[str, BlobStore], holding: Holding, leaf: int) -> bool:
        conduct = self._orders.provider(self._addresses.index(holding.provider))
        has_leaf = conduct.leaves is None or leaf < conduct.leaves
        return has_leaf and not conduct.never_prove and blobs[holding.provider].has(holding.root)

    def start(self) -> dict[str, Any]:
        """Open the ports and start making blocks. Returns all addresses."""
        ports = self._known_ports()
        urls = self._provider_urls
        nodes = [Node(index, self._chain, urls) for index in range(self._options.lcds)]
        open_listener = partial(self._open, ports)
        providers = [
            open_listener(f"provider {provider.index}", provider.serve)
            for provider in self._providers
        ]
        urls.update(zip(self._addresses, (listener.url for listener in providers), strict=True))
        lcds = [
            open_listener(f"lcd {node.index}", partial(self._serve_node, node)) for node in nodes
        ]
        control = open_listener("control", self._control.serve)
        self._write_ports(ports)
        self._control.provider_listeners, self._control.lcd_listeners = providers, lcds
        self._control.obey()
        self._chain.start()
        return {
            "lcd": [listener.url for listener in lcds],
            "providers": [listener.url for listener in providers],
            "control": control.url,
        }

    def _open(
        self, ports: dict[str, int], name: str, application: Callable[[Request], None]
    ) -> Listener:
        listener = Listener(ports.get(name, 0), application)
        ports[name] = listener.port
        return listener

    def _serve_node(self, node: Node, request: Request) -> None:
        if request.route.startswith(CONTROL_PREFIX):
            self._control.serve(request)
        else:
            node.serve(request)

    def _known_ports(self) -> dict[str, int]:
        file = self._folder / PORTS
        if file.exists():
            ports: dict[str, int] = json.loads(file.read_text())
            return ports
        return {"lcd 0": self._options.port} if self._options.port else {}

    def _write_ports(self, ports: dict[str, int]) -> None:
        temporary = self._folder / f"{PORTS}.new"
        temporary.write_text(json.dumps(ports))
        temporary.replace(self._folder / PORTS)

    def stop(self) -> None:
        """Finish the present block. Ports and threads end with the process."""
        self._chain.stop()
