"""`caf` on a Jackal network, with wallets that no other test uses."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from mnemonic import Mnemonic

from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.command_line import CommandLine
from caf_pipeline_tests.support.jackal_network import FUNDS, SPACE
from caf_pipeline_tests.support.s3_server import KEY_ID, SECRET

S3_KEYS = {
    "AWS_ACCESS_KEY_ID": KEY_ID,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass(frozen=True)
class NewWallet:
    """A mnemonic and its address."""

    words: str
    address: str


def new_wallet() -> NewWallet:
    """Return a wallet that is new to the network."""
    words = Mnemonic("english").generate(strength=128)
    return NewWallet(words, Wallet(words).address)


def wallet_with_space(network: LoopbackNetwork) -> NewWallet:
    """Return a new wallet with coins and space."""
    wallet = new_wallet()
    network.fund(wallet.address, FUNDS)
    network.grant(wallet.address, SPACE)
    return wallet


def jackal_command_line(
    folder: Path, network: LoopbackNetwork, words: str, **more: str
) -> CommandLine:
    """Return a command line for a network, with timeouts for its fast blocks."""
    environment = {
        "CAF_STORE__KIND": "jackal",
        "CAF_JACKAL__LCD": json.dumps(network.lcds),
        "CAF_JACKAL__CHAIN_ID": network.chain_id,
        "CAF_JACKAL__PROOF_SECONDS": "20",
        "CAF_JACKAL__ALLOW_PRIVATE_ADDRESSES": "true",
        "JACKAL_MNEMONIC": words,
    }
    return CommandLine(folder, S3_KEYS | environment | more)


def with_wallet(caf: CommandLine, words: str) -> CommandLine:
    """Return the same command line with another wallet."""
    return replace(caf, environment=caf.environment | {"JACKAL_MNEMONIC": words})
