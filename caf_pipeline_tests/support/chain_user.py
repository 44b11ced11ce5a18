"""A user of a Jackal network with one wallet, who sends raw requests without retries.

For tests of the loopback network, and of a client's effect on a network.
"""

import base64
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from caf_pipeline.caf.merkle import MerkleTree
from caf_pipeline.store.jackal import messages, names
from caf_pipeline.store.jackal.messages import ChainMessage, TransactionTerms
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.loopback.wire import field
from caf_pipeline_tests.support.jackal_network import ADDRESS, FUNDS, SPACE, WORDS

GAS = 200_000
FEE = 4_000


def root_of(content: bytes, proof_type: int = 3) -> bytes:
    tree = MerkleTree(proof_type)
    tree.update(content)
    return tree.root()


def random_content(size_bytes: int, seed: int | None = None) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@dataclass(frozen=True)
class Post:
    """A file on the chain, and its bytes."""

    content: bytes
    root: bytes
    owner: str
    start: int
    proof_type: int

    @property
    def path(self) -> str:
        return f"files/{names.root_in_path(self.root)}/{self.owner}/{self.start}"

    @property
    def job(self) -> str:
        return hashlib.sha256(
            self.root + self.owner.encode() + str(self.start).encode()
        ).hexdigest()

    @property
    def form(self) -> dict[str, str]:
        return {
            "sender": self.owner,
            "merkle": self.root.hex(),
            "start": str(self.start),
            "type": str(self.proof_type),
        }


class ChainUser:
    """Signs and sends. `client` belongs to the caller."""

    def __init__(self, network: LoopbackNetwork, client: httpx.Client, words: str = WORDS) -> None:
        self.network = network
        self.client = client
        self.wallet = Wallet(words)
        self.address = self.wallet.address

    # --- asking ---

    def get(self, path: str, lcd: int = 0) -> httpx.Response:
        return self.client.get(self.network.lcds[lcd] + path)

    def storage(self, path: str, lcd: int = 0) -> Any:
        return self.get(f"/jackal/canine-chain/storage/{path}", lcd)

    def height(self, lcd: int = 0) -> int:
        return int(
            self.get("/cosmos/base/tendermint/v1beta1/blocks/latest", lcd).json()["block"][
                "header"
            ]["height"]
        )

    def account(self) -> tuple[int, int]:
        answer = self.get(f"/cosmos/auth/v1beta1/accounts/{self.address}").json()
        return int(answer["account"]["account_number"]), int(answer["account"]["sequence"])

    def balance(self) -> int:
        answer = self.get(
            f"/cosmos/bank/v1beta1/balances/{self.address}/by_denom?denom=ujkl"
        ).json()
        return int(answer["balance"]["amount"])

    # --- transactions ---

    def sign(self, *sent: ChainMessage, **changes: Any) -> bytes:
        number, sequence = (
            self.account() if not {"account_number", "sequence"} <= changes.keys() else (0, 0)
        )
        terms = {
            "chain_id": self.network.chain_id,
            "account_number": number,
            "sequence": sequence,
            "timeout_height": 0,
            "gas_limit": GAS + 50_000 * len(sent),
            "fee": FEE,
        }
        return messages.sign_transaction(self.wallet, sent, TransactionTerms(**terms | changes))

    def broadcast(self, raw: bytes, lcd: int = 0) -> dict[str, Any]:
        sent = {"tx_bytes": base64.b64encode(raw).decode(), "mode": "BROADCAST_MODE_SYNC"}
        answer = self.client.post(f"{self.network.lcds[lcd]}/cosmos/tx/v1beta1/txs", json=sent)
        assert answer.status_code == 200, answer.text
        return answer.json()["tx_response"]

    def look_up(self, raw: bytes, lcd: int = 0) -> dict[str, Any] | None:
        answer = self.get(f"/cosmos/tx/v1beta1/txs/{names.transaction_hash(raw)}", lcd)
        return answer.json()["tx_response"] if answer.status_code == 200 else None

    def do(self, *sent: ChainMessage, **changes: Any) -> dict[str, Any]:
        """Sign and broadcast messages, make a block, and return the transaction."""
        raw = self.sign(*sent, **changes)
        answer = self.broadcast(raw)
        assert answer["code"] == 0, answer
        self.network.advance(1)
        included = self.look_up(raw)
        assert included is not None
        return included

    def post_message(self, root: bytes, size_bytes: int, **changes: Any) -> ChainMessage:
        options = {"copies": 3, "proof_type": 3, "note": "{}"}
        return messages.post_file(self.address, root, size_bytes, **options | changes)

    def delete_message(self, post: Post) -> ChainMessage:
        value = field(1, self.address.encode()) + field(2, post.root) + field(3, post.start)
        return ChainMessage("/canine_chain.storage.MsgDeleteFile", value)

    def post(
        self, content: bytes, *, proof_type: int = 3, size_bytes: int | None = None, **changes: Any
    ) -> Post:
        """Post a file on the chain."""
        root = root_of(content, proof_type)
        size_bytes = len(content) if size_bytes is None else size_bytes
        done = self.do(self.post_message(root, size_bytes, proof_type=proof_type, **changes))
        assert done["code"] == 0, done
        return Post(content, root, self.address, messages.post_starts(done["data"])[0], proof_type)

    # --- providers ---

    def upload(
        self, post: Post, provider: int = 0, *, version: int = 2, **changes: Any
    ) -> httpx.Response:
        content = changes.pop("content", post.content)
        url = self.network.providers[provider] + ("/v2/upload" if version == 2 else "/upload")
        form = {name: value for name, value in (post.form | changes).items() if value is not None}
        return self.client.post(url, data=form, files={"file": ("chunk", content)})

    def status(self, post: Post, provider: int = 0) -> httpx.Response:
        return self.client.get(f"{self.network.providers[provider]}/v2/status/{post.job}")

    def download(self, root: bytes, provider: int = 0, **headers: str) -> httpx.Response:
        return self.client.get(
            f"{self.network.providers[provider]}/download/{root.hex()}", headers=headers
        )

    def provers(self, post: Post) -> list[str]:
        return [proof.split("/")[0] for proof in self.storage(post.path).json()["file"]["proofs"]]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30, verify=False) as client:
        yield client


@pytest.fixture
def user(network: LoopbackNetwork, client: httpx.Client) -> ChainUser:
    """A user of a chain that makes blocks only on order."""
    network.misbehave(halted=True)
    network.advance(2)
    return ChainUser(network, client)


@contextmanager
def own_network(folder: Path, **options: Any) -> Iterator[ChainUser]:
    """A halted network with special options."""
    settings = {"fund": {ADDRESS: FUNDS}, "space": {ADDRESS: SPACE}, "block_seconds": 0.1} | options
    with (
        LoopbackNetwork(folder, **settings) as network,
        httpx.Client(timeout=30, verify=False) as client,
    ):
        network.misbehave(halted=True)
        yield ChainUser(network, client)
