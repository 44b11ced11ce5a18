"""The loopback network as a separate process, for tests and the demo.

with LoopbackNetwork(folder, fund={address: 10**9}, space={address: 10**12}) as network:
    network.misbehave(provider=0, drop_reply=True, times=1)
    network.kill()
    network.start()  # same ports, and all that a real network would remember
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from json import loads
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from caf_pipeline.system.child_environment import child_environment

START_SECONDS: Final = 180
STOP_SECONDS: Final = 30


class LoopbackNetwork:
    """A network in a folder.

    Attributes:
        lcds: addresses of the REST servers; `lcd` is the first.
        providers: addresses of the providers' servers.
        provider_addresses: the providers' names on the chain, in the same order.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        """Options are those of `options.Options`. `start` starts the network."""
        self.folder = folder
        self.lcds: list[str] = []
        self.providers: list[str] = []
        self.provider_addresses: list[str] = []
        self.chain_id = str(options.get("chain_id", "loopback-1"))
        self._options = options
        self._control: httpx.Client | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def lcd(self) -> str:
        """The address of the first REST server."""
        return self.lcds[0]

    @property
    def runs(self) -> bool:
        """True between `start` and `stop` or `kill`."""
        return self._process is not None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # --- the process ---

    def start(self) -> None:
        """Start the network, or restart it from its folder. Returns when it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "caf_pipeline_tests.loopback",
            "--folder",
            str(self.folder),
            *self._arguments(),
        ]
        with open(self.folder / "log.txt", "ab") as log:
            self._process = subprocess.Popen(
                [*command, "--while-stdin-is-open"],
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self.kill()
            raise RuntimeError(
                "the loopback network does not start: "
                f"{(self.folder / 'log.txt').read_text()[-2000:]}"
            )
        addresses = loads(line)
        self.lcds, self.providers = addresses["lcd"], addresses["providers"]
        self._control = httpx.Client(
            base_url=addresses["control"], timeout=START_SECONDS, verify=False
        )  # loads no certificates
        self.provider_addresses = [provider["address"] for provider in self.state()["providers"]]

    def _arguments(self) -> list[str]:
        arguments = []
        for name, value in self._options.items():
            option = f"--{name.replace('_', '-')}"
            if isinstance(value, Mapping):
                arguments += [
                    text for key, amount in value.items() for text in (option, f"{key}={amount}")
                ]
            else:
                arguments += [
                    option,
                    ",".join(map(str, value)) if isinstance(value, tuple) else str(value),
                ]
        return arguments

    def stop(self) -> None:
        """End the network properly. Does nothing if it does not run."""
        if self._process:
            self._process.terminate()
            self._reap()

    def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process:
            self._process.kill()
            self._reap()

    def _reap(self) -> None:
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        self._process.wait(STOP_SECONDS)
        self._process.stdin.close()
        self._process.stdout.close()
        self._process = None
        if self._control:
            self._control.close()
            self._control = None

    # --- orders: each returns the height after it ---

    def _order(self, name: str, **order: Any) -> int:
        assert self._control, "the network does not run"
        answer = self._control.post(f"/loopback/{name}", json=order)
        if answer.status_code != 200:
            raise ValueError(answer.json()["error"])
        return int(answer.json()["height"])

    def misbehave(self, **order: Any) -> int:
        """Order a fault of a provider (`provider=0, …`), an LCD (`lcd=0, …`) or the chain.

        See `misbehaviour`.
        """
        return self._order("misbehave", **order)

    def well_behaved(self) -> int:
        """End all faults."""
        return self._order("well-behaved")

    def advance(self, blocks: int) -> int:
        """Make blocks immediately, even on a halted chain."""
        return self._order("advance", blocks=blocks)

    def fund(self, address: str, amount: int) -> int:
        """Pay an address some ujkl."""
        return self._order("fund", address=address, amount=amount)

    def grant(
        self, address: str, size_bytes: int, days: float = 365, *, days_ago: float = 0
    ) -> int:
        """Give an address a plan that replaces its present one and was bought some days ago."""
        return self._order("grant", address=address, bytes=size_bytes, days=days, days_ago=days_ago)

    def expire(self, address: str) -> int:
        """End an address's plan."""
        return self._order("expire", address=address)

    def spend_sequence(self, address: str) -> int:
        """Use up a sequence of an address in the next block, as another program would."""
        return self._order("spend-sequence", address=address)

    def drop_proofs(self, merkle_root: bytes, provider: int | None = None) -> int:
        """Remove the proofs of one or all providers from a root's files for good."""
        chosen = {} if provider is None else {"provider": provider}
        return self._order("drop-proofs", merkle=merkle_root.hex(), **chosen)

    def delete_blob(self, provider: int, merkle_root: bytes) -> int:
        """Let a provider lose the bytes of a root."""
        return self._order("delete-blob", provider=provider, merkle=merkle_root.hex())

    def lose_range(self, provider: int, merkle_root: bytes, start_byte: int, end_byte: int) -> int:
        """Lose a range of a root's bytes at a provider.

        As with a real one, the chain lists it on, and it sends nothing of the range.
        """
        return self._order(
            "lose-range",
            provider=provider,
            merkle=merkle_root.hex(),
            start=start_byte,
            end=end_byte,
        )

    def kill_provider(self, provider: int) -> int:
        """Kill a provider with its open connections, uploads and jobs. Its disk stays."""
        return self._order("kill-provider", provider=provider)

    def start_provider(self, provider: int) -> int:
        """Start a killed provider again."""
        return self._order("start-provider", provider=provider)

    def move_provider(self, provider: int, url: str) -> int:
        """Change a provider's URL on the chain until the network's restart, as for a proxy."""
        return self._order("move-provider", provider=provider, url=url)

    # --- queries ---

    def state(self) -> dict[str, Any]:
        """Return the whole state of the network; see `control`."""
        assert self._control, "the network does not run"
        state: dict[str, Any] = self._control.get("/loopback/state").json()
        return state

    def traffic(self) -> dict[str, list[dict[str, int]]]:
        """Return the numbers of connections and requests of each LCD and provider."""
        assert self._control, "the network does not run"
        traffic: dict[str, list[dict[str, int]]] = self._control.get("/loopback/traffic").json()
        return traffic

    def wait_for(
        self, condition: Callable[[dict[str, Any]], Any], seconds: float = START_SECONDS
    ) -> dict[str, Any]:
        """Return the first state that meets a condition. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while True:
            state = self.state()
            if condition(state):
                return state
            if time.monotonic() > deadline:
                raise TimeoutError(f"the network did not reach the state: {state}")
            time.sleep(0.02)
