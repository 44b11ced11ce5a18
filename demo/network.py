"""The demo's Jackal network: the tests' loopback network, with a wallet that the demo creates.

python demo/network.py            keeps it running, and prints its settings: `make network`.
python demo/network.py jkl1…      also gives this address coins. Ends if it already runs.

Its data is in the settings' `home`. Its coins and its wallet have no value anywhere else.
"""

import argparse
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

from caf_pipeline.errors import UsageError
from caf_pipeline.settings import load_settings
from caf_pipeline.store.jackal.wallet import Wallet, require_address
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
SETTINGS_TO_PASTE = """
For a bucket of your own, write below [jackal] in the caf.toml of its folder:

lcd = ["{lcd}"]
chain_id = "{chain_id}"
allow_private_addresses = true  # its providers are on this machine

Then give your wallet coins, in another terminal: make network FUND=jkl1…"""

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
def running() -> Iterator[bool]:
    """Keep the network running, unless another terminal already does. Yields whether one does."""
    if SETTINGS.store.kind != "jackal":
        yield False
        return
    is_up = runs()
    address = Wallet(wallet_file().read_text(encoding="utf-8")).address
    if is_up:
        yield True
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
        yield False


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


def fund(address: str) -> None:
    """Give an address coins of the running network."""
    lcd = SETTINGS.jackal.lcd[0]
    order = {"address": address, "amount": COINS}
    answer = httpx.post(f"{lcd}/loopback/fund", json=order, timeout=ASK_SECONDS, trust_env=False)
    if answer.status_code != httpx.codes.OK:
        sys.exit(f"{lcd} gives no coins away: it is not the loopback network")
    print(f"{address} has received {COINS // 10**6:,} JKL", flush=True)


def main() -> int:
    """Print the network's settings, and keep it running until Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", nargs="?", help="give this address coins")
    address = parser.parse_args().address
    if SETTINGS.store.kind != "jackal":
        sys.exit('the store of caf.toml needs no network: its kind is not "jackal"')
    try:
        if address:
            require_address(address)
    except UsageError as error:
        sys.exit(f"FUND: {error}")
    lcd = SETTINGS.jackal.lcd[0]
    with running() as is_up:
        print(f"{lcd}  ({'already runs' if is_up else 'Ctrl-C ends it'})", flush=True)
        if address:
            fund(address)
        else:
            print(SETTINGS_TO_PASTE.format(lcd=lcd, chain_id=SETTINGS.jackal.chain_id), flush=True)
        if not is_up:
            with suppress(KeyboardInterrupt):
                signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
