"""The loopback chain matches the notes on Jackal's protocol, and otherwise a real SDK node."""

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from caf_pipeline.store.jackal import messages, names
from caf_pipeline.store.jackal.messages import ChainMessage
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline_tests.support.chain_user import (
    ChainUser,
    Post,
    client,  # noqa: F401 - a fixture
    own_network,
    random_content,
    root_of,
    user,  # noqa: F401 - a fixture
)
from caf_pipeline_tests.support.jackal_network import ADDRESS, FUNDS, SPACE
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS

OTHER_WORDS = "zoo zoo zoo zoo zoo zoo zoo zoo zoo zoo zoo wrong"
STORAGE = "/jackal/canine-chain/storage"

# Texts of a real chain.
WRONG_SEQUENCE = "account sequence mismatch, expected {}, got {}: incorrect account sequence"
MESSAGE_FAILED = "failed to execute message; message index: {}: "


def some_post(user: ChainUser, **changes: Any) -> ChainMessage:
    content = random_content(1000)
    return user.post_message(root_of(content), 1000, **changes)


# --- broadcasts ---


def spoiled(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


REFUSED: list[tuple[str, Callable[[ChainUser], bytes], int, str]] = [
    (
        "fee too low",
        lambda user: user.sign(some_post(user), fee=10),
        13,
        "insufficient fees; got: 10ujkl required: 500ujkl",
    ),
    (
        "timeout passed",
        lambda user: user.sign(some_post(user), timeout_height=1),
        30,
        "timeout height: 1: tx timeout height",
    ),
    (
        "sequence too high",
        lambda user: user.sign(some_post(user), sequence=user.account()[1] + 1),
        32,
        "account sequence mismatch",
    ),
    (
        "spoiled signature",
        lambda user: spoiled(user.sign(some_post(user))),
        4,
        "signature verification failed",
    ),
    (
        "other chain",
        lambda user: user.sign(some_post(user), chain_id="jackal-1"),
        4,
        "chain-id (loopback-1): unauthorized",
    ),
    (
        "fee above the balance",
        lambda user: user.sign(some_post(user), fee=10**15),
        5,
        "insufficient funds: insufficient funds",
    ),
    ("no gas", lambda user: user.sign(some_post(user), gas_limit=20_000), 11, "gasWanted: 20000"),
]


@pytest.mark.parametrize(
    ("make", "code", "log"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_a_transaction_that_is_wrong_is_refused_with_its_code(user, make, code, log):
    answer = user.broadcast(make(user))
    assert (answer["code"], answer["codespace"], answer["height"]) == (code, "sdk", "0")
    assert log in answer["raw_log"]
    assert user.network.state()["mempool"] == []


def test_an_old_sequence_is_refused_with_the_expected_one(user):
    user.do(some_post(user))
    number, sequence = user.account()
    answer = user.broadcast(
        user.sign(some_post(user), account_number=number, sequence=sequence - 1)
    )
    assert answer["code"] == 32
    assert answer["raw_log"] == WRONG_SEQUENCE.format(sequence, sequence - 1)


def test_repeated_broadcast_is_in_the_mempool_cache(user):
    raw = user.sign(some_post(user))
    assert user.broadcast(raw)["code"] == 0
    assert user.broadcast(raw)["code"] == 19
    user.network.advance(1)
    assert (user.broadcast(raw)["code"], user.broadcast(raw)["raw_log"]) == (19, "")


# --- blocks ---


FAILING: list[tuple[str, Callable[[ChainUser], ChainMessage], int, str, str]] = [
    (
        "note that is not JSON",
        lambda user: some_post(user, note="{"),
        17,
        "sdk",
        "note is not valid json `{`",
    ),
    (
        "no space",
        lambda user: user.post_message(b"r", SPACE),
        4,
        "sdk",
        "storage account does not have enough space available",
    ),
    (
        "29 days",
        lambda user: messages.buy_storage(user.address, 10**12, 29),
        1,
        "undefined",
        "less than 1 month",
    ),
    (
        "too dear",
        lambda user: messages.buy_storage(user.address, 10**18, 30),
        5,
        "sdk",
        "cannot send tokens from account",
    ),
    (
        "nothing to delete",
        lambda user: user.delete_message(Post(b"", b"r", ADDRESS, 1, 3)),
        22,
        "sdk",
        "file not found",
    ),
]


@pytest.mark.parametrize(
    ("make", "code", "codespace", "log"),
    [row[1:] for row in FAILING],
    ids=[row[0] for row in FAILING],
)
def test_a_message_that_fails_costs_its_fee_and_its_sequence(user, make, code, codespace, log):
    balance, (_, sequence), files = user.balance(), user.account(), user.network.state()["files"]
    done = user.do(make(user), fee=1000)
    assert (done["code"], done["codespace"], done["data"]) == (code, codespace, "")
    assert done["raw_log"].startswith(MESSAGE_FAILED.format(0))
    assert log in done["raw_log"]
    assert (balance - user.balance(), user.account()[1] - sequence) == (1000, 1)
    assert user.network.state()["files"] == files


def test_a_transaction_without_enough_gas_fails_in_the_block(user):
    assert user.do(some_post(user), gas_limit=90_000)["code"] == 11


def test_posts_of_one_transaction_happen_all_or_none(user):
    files = user.network.state()["files"]
    done = user.do(some_post(user), some_post(user), some_post(user, note="no"))
    assert done["code"] == 17
    assert done["raw_log"].startswith(MESSAGE_FAILED.format(2))
    assert user.network.state()["files"] == files


def test_repeated_root_is_a_new_file_with_new_cost(user):
    content = random_content(500)
    first, second = user.post(content), user.post(content)
    assert second.start > first.start
    listed = user.storage(f"files/merkle/{names.root_in_path(first.root)}").json()["files"]
    assert sorted(int(file["start"]) for file in listed) == [
        first.start,
        second.start,
    ]  # keys are text: 100 comes before 99
    assert user.network.state()["posts_by_root"][first.root.hex()] == 2


# --- time ---


def test_mempool_drops_transactions_past_their_timeout(user):
    user.network.misbehave(delay_inclusion=10)
    raw = user.sign(some_post(user), timeout_height=user.height() + 3)
    assert user.broadcast(raw)["code"] == 0
    user.network.advance(11)
    assert (user.look_up(raw), user.network.state()["mempool"]) == (None, [])


def test_another_program_can_take_the_sequence(user):
    raw = user.sign(some_post(user))
    user.broadcast(raw)
    user.network.spend_sequence(ADDRESS)
    sequence = user.account()[1]
    user.network.advance(3)
    assert (user.look_up(raw), user.account()[1]) == (None, sequence + 1)
    assert user.broadcast(raw)["code"] == 32


def test_a_broadcast_can_be_swallowed(user):
    user.network.misbehave(swallow_broadcast=True)
    raw = user.sign(some_post(user))
    assert user.broadcast(raw)["code"] == 0
    user.network.advance(2)
    assert user.look_up(raw) is None
    user.network.misbehave(swallow_broadcast=False)
    assert user.broadcast(raw)["code"] == 0


@pytest.mark.parametrize(("how", "included"), [("accept", True), ("drop", False)])
def test_a_broadcast_can_end_without_an_answer(user, how, included):
    user.network.misbehave(cut_broadcast=how)
    raw = user.sign(some_post(user))
    with pytest.raises(httpx.RemoteProtocolError):
        user.broadcast(raw)
    user.network.advance(1)
    assert (user.look_up(raw) is not None) is included


def test_lagging_node_answers_everything_from_an_old_state(user):
    user.network.misbehave(lcd=1, lag=3)
    post = user.post(random_content(100))
    assert user.height(lcd=1) == user.height() - 3
    assert user.storage(post.path, lcd=1).status_code == 404
    user.network.advance(3)
    assert user.storage(post.path, lcd=1).status_code == 200


# --- queries ---


def root_with_a_slash() -> bytes:
    return next(
        root
        for n in range(1000)
        if b"/" in base64.b64encode(root := root_of(random_content(10, n)))[:20]
    )


def test_loopback_takes_roots_in_padded_url_safe_base64(user):
    root = root_with_a_slash()
    user.do(user.post_message(root, 10))
    plain, safe = base64.b64encode(root).decode(), names.root_in_path(root)
    answers = {
        form: user.storage(f"files/merkle/{form}") for form in (safe, root.hex(), safe.rstrip("="))
    }
    assert [answer.status_code for answer in answers.values()] == [200, 200, 400]
    assert [len(answer.json().get("files", [])) for answer in answers.values()] == [1, 0, 0]
    path = f"{STORAGE}/files/{{}}/{ADDRESS}/{user.height()}"
    quoted = plain.replace("/", "%2F").replace("+", "%2B").replace("=", "%3D")
    assert [user.get(path.format(form)).status_code for form in (safe, root.hex(), quoted)] == [
        200,
        404,
        501,
    ]
    unknown = user.get(path.format(root.hex())).json()
    assert (unknown["code"], "not found" in unknown["message"]) == (5, True)


# --- proofs ---


@pytest.mark.parametrize("how", ["bytes lost", "unwilling"])
def test_provider_that_misses_a_window_is_dropped(user, how):
    post = user.post(random_content(100))
    user.upload(post, 0)
    user.upload(post, 1)
    user.network.advance(1)
    if how == "unwilling":
        user.network.misbehave(provider=0, never_prove=True)
    else:
        user.network.delete_blob(0, post.root)
    user.network.advance(100)
    assert len(user.provers(post)) == 2
    user.network.advance(100)
    assert user.provers(post) == [user.network.provider_addresses[1]]


def proof_of(user: ChainUser, post: Post, provider: int = 0) -> tuple[int, int] | None:
    """Return the height and the next leaf that the chain shows."""
    proofs = user.storage(f"proofs/{user.network.provider_addresses[provider]}").json()["proofs"]
    root = base64.b64encode(post.root).decode()
    matching = [
        proof for proof in proofs if (proof["merkle"], proof["start"]) == (root, str(post.start))
    ]
    return (
        (int(matching[0]["last_proven"]), int(matching[0]["chunk_to_prove"])) if matching else None
    )


def test_rejoining_after_failed_proofs_only_moves_the_height(
    tmp_path,
):
    with own_network(tmp_path, proof_window=10, version="5.0.1") as user:
        post = user.post(random_content(40_000))
        user.upload(post)
        user.network.advance(15)
        assert proof_of(user, post) == (post.start + 1, 0)
        user.network.advance(10)
        assert proof_of(user, post) == (
            post.start + 21,
            0,
        )  # dropped at the first block of the window, back at the next
        assert len(user.provers(post)) == 1
        type_0 = user.post(random_content(40_000), proof_type=0)
        user.upload(type_0)
        for _ in range(9):
            user.network.advance(10)
        assert proof_of(user, type_0)[0] > type_0.start + 80


def test_verified_proof_draws_any_leaf_but_the_last(tmp_path):
    drawn = {3: set(), 5: set()}
    with own_network(tmp_path, proof_window=2) as user:
        posts = {leaves: user.post(random_content(leaves * 10_240)) for leaves in drawn}
        small = user.post(random_content(20_480))
        for post in (*posts.values(), small):
            user.upload(post)
        for _ in range(60):
            user.network.advance(2)
            for leaves, post in posts.items():
                drawn[leaves].add(proof_of(user, post)[1])
            height, leaf = proof_of(user, small)
            assert leaf == 0
        assert drawn == {3: {0, 1}, 5: {0, 1, 2, 3}}
        assert height > small.start + 100


def test_provider_with_one_leaf_rejoins_after_being_dropped(tmp_path):
    with own_network(tmp_path, proof_window=10, no_zero_draws=1) as user:
        post = user.post(random_content(400_000))
        user.network.misbehave(provider=0, leaves=1)
        user.upload(post)
        windows = set()
        for _ in range(60):
            user.network.advance(1)
            if (proof := proof_of(user, post)) and proof[1]:
                windows.add((proof[0] - post.start) // 10)
        assert windows == {0, 2, 4}


def test_deletion_by_a_stranger_removes_bytes_of_listed_posts(tmp_path):
    stranger_address = Wallet(OTHER_WORDS).address
    wealth = {
        "fund": {ADDRESS: FUNDS, stranger_address: FUNDS},
        "space": {ADDRESS: SPACE, stranger_address: SPACE},
    }
    with own_network(tmp_path, proof_window=10, **wealth) as user:
        post = user.post(random_content(40_000))
        user.upload(post)
        user.network.advance(1)
        stranger = ChainUser(user.network, user.client, OTHER_WORDS)
        other_post = stranger.post(post.content)
        stranger.upload(other_post)
        user.network.advance(1)
        stranger.do(stranger.delete_message(other_post))
        assert user.download(post.root).status_code == 500
        assert len(user.provers(post)) == 1
        user.network.advance(30)
        assert user.provers(post) == []


def test_no_more_providers_are_listed_than_were_paid_for(user):
    post = user.post(random_content(100), copies=2)
    for provider in range(3):
        user.upload(post, provider)
    user.network.advance(3)
    assert len(user.provers(post)) == 2


def test_proofs_can_be_dropped_and_come_back_with_the_bytes(user):
    post = user.post(random_content(100))
    user.upload(post)
    user.network.advance(1)
    user.network.drop_proofs(post.root)
    user.network.advance(5)
    assert user.provers(post) == []
    assert user.upload(post).status_code == 202
    user.network.advance(1)
    assert len(user.provers(post)) == 1


# --- memory ---


def test_everything_outlives_sigkill(user):
    post = user.post(random_content(3000))
    user.upload(post)
    user.network.advance(1)
    waiting = user.sign(some_post(user))
    user.broadcast(waiting)
    before, addresses = user.network.state(), (user.network.lcds, user.network.providers)
    user.network.kill()
    user.network.start()
    assert user.network.state() == before
    assert (user.network.lcds, user.network.providers) == addresses
    assert user.download(post.root).content == post.content
    user.network.advance(1)
    assert user.look_up(waiting)["code"] == 0


def test_network_ends_on_order_or_without_its_parent(tmp_path):
    command = [
        sys.executable,
        "-m",
        "caf_pipeline_tests.loopback",
        "--folder",
        str(tmp_path),
        "--while-stdin-is-open",
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for end in (lambda one: one.terminate(), lambda one: one.stdin.close()):
        with subprocess.Popen(command, **pipes) as started:
            addresses = json.loads(started.stdout.readline())
            assert [len(addresses[name]) for name in ("lcd", "providers")] == [1, 3]
            end(started)
            assert (started.wait(PATIENCE_SECONDS), started.stderr.read()) == (0, b"")


# --- the program ---
