"""Fixtures of a Jackal network: the loopback program, shared by a module's tests, and its settings.

network         the module's network; it runs and behaves well when a test begins
wallet_words    the mnemonic of its wallet, which no other program should ever use
"""

from collections.abc import Iterator
from typing import Any, Final

import pytest
from pydantic import SecretStr

from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline_tests.loopback.network import LoopbackNetwork

WORDS: Final = " ".join(["abandon"] * 11 + ["about"])
ADDRESS: Final = Wallet(WORDS).address
FUNDS: Final = 10**12
SPACE: Final = 10**12
BLOCK_SECONDS: Final = 0.1


def jackal_settings(network: LoopbackNetwork, **changes: Any) -> JackalSettings:
    """Return settings for a network, with limits for its fast blocks."""
    settings: dict[str, Any] = {
        "lcd": tuple(network.lcds),
        "chain_id": network.chain_id,
        "mnemonic": SecretStr(WORDS),
        "proof_type": 3,
        "upload_seconds": 60,
        "proof_seconds": 20,
        "allow_private_addresses": True,
    }
    return JackalSettings(**settings | changes)


@pytest.fixture
def wallet_words() -> str:
    """The mnemonic of the wallet with coins and space."""
    return WORDS


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackNetwork]:
    """A network for the module. Its wallet has coins and space."""
    folder = tmp_path_factory.mktemp("jackal")
    options = {
        "providers": 4,
        "lcds": 2,
        "block_seconds": BLOCK_SECONDS,
        "proof_window": 100,
        "no_zero_draws": 1,
    }
    with LoopbackNetwork(
        folder, fund={ADDRESS: FUNDS}, space={ADDRESS: SPACE}, **options
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _network_in_good_order(request: pytest.FixtureRequest) -> None:
    """Restart the network if the last test ended it, and end all faults."""
    if "network" in request.fixturenames:
        network: LoopbackNetwork = request.getfixturevalue("network")
        if not network.runs:
            network.start()
        network.well_behaved()
