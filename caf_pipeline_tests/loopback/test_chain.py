"""The loopback chain matches the notes on Jackal's protocol, and otherwise a real SDK node."""

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from caf_pipeline.store.jackal import answers, messages, names
from caf_pipeline.store.jackal.messages import ChainMessage
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.chain_user import ChainUser, Post, log_of, random_content, root_of
from caf_pipeline_tests.support.jackal_network import ADDRESS, FUNDS, SPACE
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS

OTHER_WORDS = "zoo zoo zoo zoo zoo zoo zoo zoo zoo zoo zoo wrong"
STORAGE = "/jackal/canine-chain/storage"

# Texts of a real chain.
WRONG_SEQUENCE = "account sequence mismatch, expected {}, got {}: incorrect account sequence"
UNKNOWN_ACCOUNT = "rpc error: code = NotFound desc = account {} not found: key not found"
BAD_BASE64 = "illegal base64 data at input byte 0"
MESSAGE_FAILED = "failed to execute message; message index: {}: "


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
        "no fee",
        lambda user: user.sign(some_post(user), fee=0),
        13,
        "insufficient fees; got:  required: 500ujkl",
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
        "other account",
        lambda user: user.sign(some_post(user), account_number=77),
        4,
        "account number (0)",
    ),
    (
        "fee above the balance",
        lambda user: user.sign(some_post(user), fee=10**15),
        5,
        "insufficient funds: insufficient funds",
    ),
    ("no gas", lambda user: user.sign(some_post(user), gas_limit=20_000), 11, "gasWanted: 20000"),
    ("no transaction", lambda user: b"\x00garbage", 2, "tx parse error"),
    (
        "unknown message",
        lambda user: user.sign(ChainMessage("/a.b.MsgC", b"")),
        2,
        "unable to resolve type URL /a.b.MsgC",
    ),
    ("no message", lambda user: user.sign(), 18, "must contain at least one message"),
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


def test_an_account_that_was_never_paid_is_unknown(user, client):
    stranger = ChainUser(user.network, client, OTHER_WORDS)
    assert stranger.get(f"/cosmos/auth/v1beta1/accounts/{stranger.address}").json() == {
        "code": 5,
        "message": UNKNOWN_ACCOUNT.format(stranger.address),
        "details": [],
    }
    answer = stranger.broadcast(stranger.sign(some_post(stranger), account_number=0, sequence=0))
    assert (answer["code"], stranger.balance()) == (9, 0)


def test_repeated_broadcast_is_in_the_mempool_cache(user):
    raw = user.sign(some_post(user))
    assert user.broadcast(raw)["code"] == 0
    assert user.broadcast(raw)["code"] == 19
    user.network.advance(1)
    assert (user.broadcast(raw)["code"], user.broadcast(raw)["raw_log"]) == (19, "")


def test_a_node_that_started_again_has_forgotten_its_cache(user):
    raw = user.sign(some_post(user))
    user.broadcast(raw)
    user.network.advance(1)
    user.network.kill()
    user.network.start()
    assert user.broadcast(raw)["code"] == 32


def test_mempool_accepts_consecutive_sequences(user):
    number, sequence = user.account()
    first, second = (
        user.sign(some_post(user), account_number=number, sequence=sequence + n) for n in (0, 1)
    )
    assert [user.broadcast(raw)["code"] for raw in (first, second)] == [0, 0]
    user.network.advance(1)
    assert [user.look_up(raw)["code"] for raw in (first, second)] == [0, 0]


def test_a_broadcast_needs_base64_and_a_mode(user):
    url = f"{user.network.lcd}/cosmos/tx/v1beta1/txs"
    broken = user.client.post(url, json={"tx_bytes": "!!", "mode": "BROADCAST_MODE_SYNC"})
    assert (broken.status_code, broken.json()["message"]) == (
        400,
        BAD_BASE64,
    )
    assert user.client.post(url, json={"tx_bytes": "AAAA"}).status_code == 500
    assert user.client.post(url, content=b"x").status_code == 400


# --- blocks ---


def test_included_transaction_is_found_by_hash(user):
    raw = user.sign(some_post(user))
    assert user.broadcast(raw)["txhash"] == names.transaction_hash(raw)
    unknown = user.get(f"/cosmos/tx/v1beta1/txs/{names.transaction_hash(raw)}")
    assert (unknown.status_code, unknown.json()["code"]) == (404, 5)
    user.network.advance(1)
    answer = user.look_up(raw)
    assert (answer["code"], answer["height"], answer["gas_used"]) == (
        0,
        str(user.height()),
        "105000",
    )


def test_start_is_the_inclusion_height_in_data_and_event(user):
    done = user.do(some_post(user), some_post(user))
    assert messages.post_starts(done["data"]) == [int(done["height"])] * 2
    events = [
        event for log in done["logs"] for event in log["events"] if event["type"] == "post_file"
    ]
    assert [
        {attribute["key"]: attribute["value"] for attribute in event["attributes"]}["start"]
        for event in events
    ] == [done["height"]] * 2


def test_eight_posts_fit_in_one_transaction_of_some_455000_gas(user):
    done = user.do(*(some_post(user) for _ in range(8)))
    assert (done["code"], done["gas_used"]) == (0, "455000")


FAILING: list[tuple[str, Callable[[ChainUser], ChainMessage], int, str, str]] = [
    (
        "note that is not JSON",
        lambda user: some_post(user, note="{"),
        17,
        "sdk",
        "note is not valid json `{`",
    ),
    ("no note", lambda user: some_post(user, note=""), 17, "sdk", "note is not valid json ``"),
    ("empty file", lambda user: user.post_message(b"", 0), 18, "sdk", "invalid request"),
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
        "too little",
        lambda user: messages.buy_storage(user.address, 10**9 - 1, 30),
        1,
        "undefined",
        "less than a gb",
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


def test_post_needs_a_running_plan(user, client):
    stranger = ChainUser(user.network, client, OTHER_WORDS)
    user.network.fund(stranger.address, 10**6)
    assert stranger.do(some_post(stranger))["code"] == 22
    assert stranger.storage(f"payment_info/{stranger.address}").status_code == 404
    user.network.grant(stranger.address, 10**9)
    assert stranger.do(some_post(stranger))["code"] == 0
    user.network.expire(stranger.address)
    expired = stranger.do(some_post(stranger))
    assert (expired["code"], "is expired" in expired["raw_log"]) == (4, True)


def test_space_is_charged_for_every_copy(user):
    before = user.network.state()["plans"][ADDRESS]["used_bytes"]
    user.post(random_content(1000), copies=5)
    assert user.network.state()["plans"][ADDRESS]["used_bytes"] - before == 5000


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


def test_a_proof_interval_is_the_chain_s_own(user):
    answer = user.storage(user.post(random_content(500)).path).json()["file"]
    assert (
        answer["proof_interval"] == user.storage("params").json()["params"]["proof_window"] == "100"
    )


def test_space_that_is_bought_takes_the_place_of_the_plan(user, client):
    buyer = ChainUser(
        user.network,
        client,
        "legal winner thank year wave sausage worth useful legal winner thank yellow",
    )
    user.network.fund(buyer.address, 10**9)
    assert buyer.storage("price_check/60/2000000000").json() == {"price": "100000"}
    assert buyer.do(messages.buy_storage(buyer.address, 2 * 10**9, 60), fee=1000)["code"] == 0
    assert buyer.balance() == 10**9 - 1000 - 100_000
    balance = buyer.balance()
    buyer.do(messages.buy_storage(buyer.address, 10**9, 30), fee=1000)
    assert buyer.balance() == balance - 1000  # the running plan is worth more
    plan = buyer.storage(f"payment_info/{buyer.address}").json()["storage_payment_info"]
    assert (plan["spaceAvailable"], plan["spaceUsed"]) == ("1000000000", "0")
    assert plan["end"].endswith("Z")


def test_purchase_deducts_the_running_plan_in_its_events(user, client):
    buyer = ChainUser(
        user.network,
        client,
        "letter advice cage absurd amount doctor acoustic avoid letter advice cage above",
    )
    user.network.fund(buyer.address, 10**9)
    buyer.do(messages.buy_storage(buyer.address, 10**9, 30), fee=1000)
    balance = buyer.balance()
    done = buyer.do(messages.buy_storage(buyer.address, 3 * 10**9, 30), fee=1000)
    paid = balance - buyer.balance() - 1000
    assert 2 * 25_000 <= paid <= 2 * 25_000 + 100  # a block or two of the first plan are used up
    assert (
        answers.parse_transaction(answers.ChainAnswer({"tx_response": done}, "q")).moved[
            buyer.address
        ]
        == -paid
    )


# --- time ---


def test_mempool_drops_transactions_past_their_timeout(user):
    user.network.misbehave(delay_inclusion=10)
    raw = user.sign(some_post(user), timeout_height=user.height() + 3)
    assert user.broadcast(raw)["code"] == 0
    user.network.advance(11)
    assert (user.look_up(raw), user.network.state()["mempool"]) == (None, [])


def test_transaction_after_its_timeout_fails_without_cost(user):
    raw = user.sign(
        some_post(user), timeout_height=user.height()
    )  # a node accepts it up to this height, but no block can include it
    balance, account = user.balance(), user.account()
    assert user.broadcast(raw)["code"] == 0
    user.network.advance(1)
    assert (user.look_up(raw)["code"], user.balance(), user.account()) == (30, balance, account)


def test_inclusion_can_be_late(user):
    user.network.misbehave(delay_inclusion=5)
    raw = user.sign(some_post(user))
    user.broadcast(raw)
    user.network.advance(5)
    assert user.look_up(raw) is None
    user.network.advance(1)
    assert user.look_up(raw)["code"] == 0


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


def test_a_full_mempool_takes_nothing(user):
    user.network.misbehave(mempool_full=True)
    assert user.broadcast(user.sign(some_post(user)))["code"] == 20


def test_lagging_node_answers_everything_from_an_old_state(user):
    user.network.misbehave(lcd=1, lag=3)
    post = user.post(random_content(100))
    assert user.height(lcd=1) == user.height() - 3
    assert user.storage(post.path, lcd=1).status_code == 404
    user.network.advance(3)
    assert user.storage(post.path, lcd=1).status_code == 200


def test_node_can_misbehave_in_each_way(user):
    node_info = "/cosmos/base/tendermint/v1beta1/node_info"
    user.network.misbehave(lcd=1, chain_id="jackal-1")
    assert user.get(node_info, lcd=1).json()["default_node_info"]["network"] == "jackal-1"
    user.network.misbehave(lcd=1, fail=503)
    assert user.get(node_info, lcd=1).status_code == 503
    user.network.misbehave(lcd=1, refuse=True)
    with pytest.raises(httpx.ConnectError), httpx.Client() as fresh:
        fresh.get(user.network.lcds[1] + node_info)
    user.network.well_behaved()
    user.network.misbehave(halted=True)
    raw = user.sign(some_post(user))
    user.broadcast(raw)
    user.network.advance(1)
    user.network.misbehave(lcd=1, index_off=True)
    assert (user.look_up(raw, lcd=1), user.look_up(raw)["code"]) == (None, 0)


@pytest.mark.parametrize("kind", ["html", "huge", "short"])
def test_a_node_can_answer_nonsense(user, kind):
    user.network.misbehave(lcd=1, nonsense=kind)
    try:
        assert (
            "block"
            not in user.get("/cosmos/base/tendermint/v1beta1/blocks/latest", lcd=1).text[:100]
        )
    except httpx.RemoteProtocolError:
        assert kind == "short"


def test_blocks_have_heights_and_times_and_go_on_by_themselves(network, client):
    user = ChainUser(network, client)
    first_height = user.height()
    network.wait_for(lambda state: state["height"] > first_height + 3)
    latest = user.get("/cosmos/base/tendermint/v1beta1/blocks/latest").json()["block"]["header"]
    first = user.get("/cosmos/base/tendermint/v1beta1/blocks/1").json()["block"]["header"]
    assert (latest["chain_id"], first["height"]) == (network.chain_id, "1")
    assert first["time"] < latest["time"]
    network.misbehave(halted=True)
    height = network.advance(0)
    assert network.advance(0) == height


@pytest.mark.parametrize(
    ("height", "message"),
    [
        ("99999999", "bigger then the chain length"),
        ("0", "height must be greater than 0"),
        ("x", 'parsing "x"'),
    ],
)
def test_a_block_that_is_not_there_is_a_bad_request(user, height, message):
    answer = user.get(f"/cosmos/base/tendermint/v1beta1/blocks/{height}")
    assert (answer.status_code, answer.json()["code"]) == (400, 3)
    assert message in answer.json()["message"]


# --- queries ---


def test_account_balance_and_node_match_a_real_chain(user):
    user.do(some_post(user))
    account = user.get(f"/cosmos/auth/v1beta1/accounts/{ADDRESS}").json()["account"]
    assert (account["@type"], account["account_number"]) == (
        "/cosmos.auth.v1beta1.BaseAccount",
        "0",
    )
    assert base64.b64decode(account["pub_key"]["key"]) == user.wallet.public_key
    balances = user.get(f"/cosmos/bank/v1beta1/balances/{ADDRESS}").json()
    assert balances["balances"] == [{"denom": "ujkl", "amount": str(user.balance())}]
    assert user.get(f"/cosmos/bank/v1beta1/balances/{ADDRESS}/by_denom").status_code == 400
    assert user.get("/cosmos/auth/v1beta1/accounts/jkl1xyz").status_code == 400
    assert user.get("/cosmos/base/tendermint/v1beta1/syncing").json() == {"syncing": False}


def root_with_a_slash() -> bytes:
    return next(
        root
        for n in range(1000)
        if b"/" in base64.b64encode(root := root_of(random_content(10, n)))[:20]
    )


def test_a_file_tells_everything_with_base64_and_integers_as_strings(user):
    post = user.post(random_content(700), note='{"a":1}')
    assert user.storage(post.path).json() == {
        "file": {
            "merkle": base64.b64encode(post.root).decode(),
            "owner": ADDRESS,
            "start": str(post.start),
            "expires": "0",
            "file_size": "700",
            "proof_interval": "100",
            "proof_type": "3",
            "proofs": [],
            "max_proofs": "3",
            "note": '{"a":1}',
        }
    }


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


def test_unknown_path_is_not_implemented(user):
    answer = user.get("/nope")
    assert (answer.status_code, answer.headers["Content-Type"]) == (501, "application/json")
    assert answer.json() == {"code": 12, "message": "Not Implemented", "details": []}


def pages(user: ChainUser, path: str, name: str, limit: int) -> list[list[Any]]:
    listed, key = [], ""
    while True:
        query = {"pagination.limit": str(limit)} | ({"pagination.key": key} if key else {})
        answer = user.client.get(f"{user.network.lcd}{STORAGE}/{path}", params=query).json()
        listed.append(answer[name])
        key = answer["pagination"]["next_key"]
        if key is None:
            return listed


def test_lists_are_paged_by_key_and_limit(user):
    for _ in range(3):
        user.post(random_content(100))
    listed = pages(user, "files", "files", 2)
    assert all(len(page) == 2 for page in listed[:-1])
    files = [(file["merkle"], file["start"]) for page in listed for file in page]
    assert len(files) == len(set(files)) == len(user.network.state()["files"])
    assert [len(page) for page in pages(user, "providers", "providers", 3)] == [3, 1]


def test_files_by_note_come_in_possibly_empty_pages(tmp_path):
    with own_network(tmp_path, fund={ADDRESS: FUNDS, Wallet(OTHER_WORDS).address: FUNDS}) as user:
        stranger = ChainUser(user.network, user.client, OTHER_WORDS)
        user.network.grant(stranger.address, 10**9)
        for _ in range(5):
            user.post(random_content(100), note='{"caf_pipeline":"mine"}')
        stranger.post(random_content(100), note='{"caf_pipeline":"theirs","n":1}')
        user.post(random_content(100), note='["caf_pipeline"]')
        listed = pages(user, "files/note/caf_pipeline/theirs", "files", 1)
        assert (len(listed), sorted(map(len, listed))) == (7, [0] * 6 + [1])
        assert [file["owner"] for page in listed for file in page] == [stranger.address]


def test_young_chain_has_no_active_providers_or_statistics(tmp_path):
    with own_network(tmp_path, space={}) as user:
        assert user.storage("active_providers").json() == {"providers": []}
        assert len(user.storage("providers").json()["providers"]) == 3
        assert user.storage("storage_stats").status_code == 500
        user.network.grant(ADDRESS, 10**9)
        assert user.storage("storage_stats").json()["purchased"] == str(10**9)


def test_active_providers_are_looked_up_by_address(user):
    post = user.post(random_content(100))
    user.upload(post)
    user.network.advance(1)
    address = user.network.provider_addresses[0]
    assert {"address": address} in user.storage("active_providers").json()["providers"]
    provider = user.storage(f"providers/{address}").json()["provider"]
    assert (provider["ip"], provider["totalspace"]) == (user.network.providers[0], str(1 << 40))
    assert user.storage("providers/jkl1nobody").status_code == 404
    assert user.storage(f"find_file/{names.root_in_path(post.root)}").json() == {
        "provider_ips": [provider["ip"]]
    }


def test_moved_provider_has_its_new_url_on_the_chain(user):
    url, path = user.network.providers[0], f"providers/{user.network.provider_addresses[0]}"
    user.network.move_provider(0, "http://127.0.0.1:9")
    assert user.storage(path).json()["provider"]["ip"] == "http://127.0.0.1:9"
    user.network.move_provider(0, url)


def test_a_price_is_for_a_month_at_least(user):
    assert user.storage("price_check/30/1000000000").json() == {"price": "25000"}
    assert user.storage("price_check/29/1000000000").status_code == 500


# --- proofs ---


def last_proven(user: ChainUser, post: Post, provider: int = 0) -> int | None:
    proofs = user.storage(f"proofs/{user.network.provider_addresses[provider]}").json()["proofs"]
    root = base64.b64encode(post.root).decode()
    return next(
        (
            int(proof["last_proven"])
            for proof in proofs
            if (proof["merkle"], proof["start"]) == (root, str(post.start))
        ),
        None,
    )


def test_proof_is_listed_next_block_and_renewed_each_window(user):
    post = user.post(random_content(100))
    user.upload(post)
    assert user.provers(post) == []
    user.network.advance(1)
    proof = user.storage(post.path).json()["file"]["proofs"]
    assert proof == [
        f"{user.network.provider_addresses[0]}/{ADDRESS}/{post.root.hex()}/{post.start}/"
    ]
    first = last_proven(user, post)
    user.network.advance(100)
    second = last_proven(user, post)
    user.network.advance(100)
    assert post.start < first < second < last_proven(user, post)


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


def version_of(user: ChainUser, lcd: int = 0) -> str:
    return user.get("/cosmos/base/tendermint/v1beta1/node_info", lcd).json()["application_version"][
        "version"
    ]


def test_rejoining_after_failed_proofs_only_moves_the_height(
    tmp_path,
):
    with own_network(tmp_path, proof_window=10, version="5.0.1") as user:
        assert version_of(user) == "5.0.1"
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


def test_a_node_may_name_another_version_than_the_truth(tmp_path):
    with own_network(tmp_path, lcds=2) as user:
        user.network.misbehave(lcd=1, version="v5.0.1")
        assert [version_of(user, lcd) for lcd in (0, 1)] == ["5.1.0", "v5.0.1"]


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


def test_a_mempool_can_be_forgotten(user):
    user.network.misbehave(forget_mempool=True)
    raw = user.sign(some_post(user))
    user.broadcast(raw)
    user.network.kill()
    user.network.start()
    user.network.advance(2)
    assert user.look_up(raw) is None
    assert user.broadcast(raw)["code"] == 0


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


def test_many_posts_and_uploads_at_once_are_all_taken_once(tmp_path):
    with own_network(tmp_path) as user:
        number, sequence = user.account()
        contents = [random_content(50_000) for _ in range(12)]
        sent = [user.post_message(root_of(content), len(content)) for content in contents]
        signed = [
            user.sign(message, account_number=number, sequence=sequence + n)
            for n, message in enumerate(sent)
        ]
        assert {user.broadcast(raw)["code"] for raw in signed} == {0}
        start = user.network.advance(1)
        posts = [Post(content, root_of(content), ADDRESS, start, 3) for content in contents]
        user.network.misbehave(halted=False)
        with ThreadPoolExecutor(12) as pool:
            jobs = [(post, provider) for post in posts for provider in range(3)]
            assert {
                answer.status_code for answer in pool.map(lambda job: user.upload(*job), jobs)
            } == {202}
        state = user.network.wait_for(
            lambda state: all(len(file["providers"]) == 3 for file in state["files"])
        )
        assert set(state["uploads_by_root"].values()) == {3}
    assert log_of(tmp_path) == ""


def test_orders_that_make_no_sense_are_refused(network):
    with pytest.raises(ValueError, match="has no laziness"):
        network.misbehave(provider=0, laziness=1)


def test_a_simulation_tells_the_gas_and_needs_no_fee(user):
    raw = user.sign(some_post(user), fee=0, gas_limit=0)
    answer = user.client.post(
        f"{user.network.lcd}/cosmos/tx/v1beta1/simulate",
        json={"tx_bytes": base64.b64encode(raw).decode()},
    )
    assert answer.json()["gas_info"]["gas_used"] == "105000"


def test_high_s_is_an_invalid_signature(user):
    raw = user.sign(some_post(user))
    order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
    high = order - int.from_bytes(raw[-32:], "big")
    assert user.broadcast(raw[:-32] + high.to_bytes(32, "big"))["code"] == 4


def test_a_file_is_unknown_by_another_start(user):
    post = user.post(random_content(50))
    assert user.storage(replace(post, start=post.start + 1).path).status_code == 404


# --- the program ---


TOLD_AT_EVERY_LINE = """
import signal, sys
from caf_pipeline_tests.loopback.__main__ import end_signals

def tell_again(frame, event, value):
    if event == "line":
        handle(signal.SIGTERM, None)
    return tell_again

over = end_signals()
handle = signal.getsignal(signal.SIGINT)
sys.settrace(tell_again)
handle(signal.SIGINT, None)
sys.settrace(None)
over.get()
"""


def test_network_ends_when_ordered_twice():
    subprocess.run([sys.executable, "-c", TOLD_AT_EVERY_LINE], timeout=PATIENCE_SECONDS, check=True)
