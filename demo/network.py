"""The demo's Jackal network: the tests' loopback network, with a wallet that the demo creates.

`make network` keeps it running. Its data is in the settings' `home`. Its coins and its wallet have
no value anywhere else.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

import httpx
import ports
from mnemonic import Mnemonic

from caf_pipeline.settings import load_settings
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline.system.child_environment import Need, child_environment
from caf_pipeline.system.secret_files import make_private
from caf_pipeline_tests.loopback.network import LoopbackNetwork

SETTINGS = load_settings()
PROVIDERS = 4
BLOCK_SECONDS = 0.5  # the real network needs about six
COINS = 10_000_000_000  # ujkl
SPACE_BYTES = 100_000_000_000
DAYS = 30
ASK_SECONDS = 5
NODE_INFO = "cosmos/base/tendermint/v1beta1/node_info"

CAF = str(Path(sys.executable).with_name("caf"))


def environment() -> dict[str, str]:
    """Return the environment of the demo's commands, without S3 keys and the user's wallet."""
    return child_environment(
        Need.SETTINGS | Need.NETWORK | Need.LEDGER | Need.STORAGE | Need.POSTGRES
    )


def wallet_file() -> Path:
    """Return the file with the wallet's words. Create it with mode 600 if it is missing."""
    path = SETTINGS.jackal.mnemonic_file
    if path is None:
        sys.exit("the demo needs jackal.mnemonic_file in caf.toml")
    if not path.exists():
        make_private(path.parent)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(Mnemonic("english").generate(strength=128))
    return path


def runs() -> bool:
    """Return whether the demo's network is already running, or the settings do not need it.

    Ends this process if another program uses the port.
    """
    if SETTINGS.store.kind != "jackal":
        return True
    address = urlsplit(SETTINGS.jackal.lcd[0])
    try:
        answer = httpx.get(
            f"{SETTINGS.jackal.lcd[0]}/{NODE_INFO}", timeout=ASK_SECONDS, trust_env=False
        )
        if answer.json()["default_node_info"]["network"] == SETTINGS.jackal.chain_id:
            return True
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        pass  # nothing listens there, or another program does
    hint = "set another port in lcd of [jackal] in caf.toml"
    ports.require_free(
        address.hostname or "127.0.0.1",
        address.port or 0,
        user="the demo's Jackal network",
        hint=hint,
    )
    return False


@contextmanager
def running() -> Iterator[None]:
    """Keep the network running, unless another terminal already does."""
    if SETTINGS.store.kind != "jackal":
        yield
        return
    is_up = runs()
    address = Wallet(wallet_file().read_text(encoding="utf-8")).address
    if is_up:
        yield
        return
    port = urlsplit(SETTINGS.jackal.lcd[0]).port
    make_private(SETTINGS.home / "network")
    with LoopbackNetwork(
        SETTINGS.home / "network",
        port=port or 0,
        providers=PROVIDERS,
        block_seconds=BLOCK_SECONDS,
        chain_id=SETTINGS.jackal.chain_id,
        fund={address: COINS},
    ):
        yield


def buy_space() -> None:
    """Buy space with the `caf` command if the wallet has none."""
    if SETTINGS.store.kind != "jackal":
        return
    wallet = subprocess.run(
        [CAF, "jackal", "wallet", "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if wallet.returncode == 0 and '"plan": null' not in wallet.stdout:
        return
    size, days = str(SPACE_BYTES), str(DAYS)
    purchase = subprocess.run(
        [CAF, "jackal", "buy", "--bytes", size, "--days", days, "--yes"],
        env=environment(),
        check=False,
    )
    if purchase.returncode:
        sys.exit(purchase.returncode)


def main() -> int:
    """Keep the network running until Ctrl-C."""
    with running():
        print(f"{SETTINGS.jackal.lcd[0]}  (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
