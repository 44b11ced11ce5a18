"""Strict parsing of chain nodes' answers.

Answers outside the storage module have the shapes of a Cosmos SDK 0.45 node.
"""

import base64
from datetime import UTC, datetime

import pytest

from caf_pipeline.errors import ChainUnreachable
from caf_pipeline.store.jackal import answers
from caf_pipeline.store.jackal.answers import (
    Account,
    Broadcast,
    ChainAnswer,
    ChainFile,
    IncludedTransaction,
    Provider,
    Refusal,
    StoragePlan,
)
from caf_pipeline_tests.support.jackal_network import ADDRESS

ROOT = bytes(range(64))
FILE = {
    "merkle": base64.b64encode(ROOT).decode(),
    "owner": ADDRESS,
    "start": "1234",
    "expires": "0",
    "file_size": "34359738368",
    "proof_interval": "7200",
    "proof_type": "3",
    "proofs": [f"jkl1one/{ADDRESS}/00ff/1234/", f"jkl1two/{ADDRESS}/00ff/1234/"],
    "max_proofs": "3",
    "note": '{"caf_pipeline":"a1b2"}',
}


def answer(value):
    return ChainAnswer(value, "q")


def test_a_file_is_read_with_its_providers():
    file = answers.parse_file(answer(FILE | {"new": 1}))
    assert file == ChainFile(
        merkle_root=ROOT,
        owner=ADDRESS,
        start=1234,
        expires=0,
        size_bytes=32 * 2**30,
        proof_type=3,
        max_proofs=3,
        note='{"caf_pipeline":"a1b2"}',
        proofs=tuple(FILE["proofs"]),
        proof_interval=int(FILE["proof_interval"]),
    )
    assert file.providers == ("jkl1one", "jkl1two")


def test_answers_are_read():
    assert answers.parse_account(
        answer({"account": {"account_number": "7", "sequence": "3", "pub_key": None}})
    ) == Account(7, 3)
    provider = {
        "address": "jkl1p",
        "ip": "https://p.example",
        "totalspace": "1000",
        "keybase_identity": "",
    }
    assert answers.parse_provider(answer(provider)) == Provider("jkl1p", "https://p.example", 1000)
    sent = {
        "height": "0",
        "txhash": "AB",
        "codespace": "sdk",
        "code": 32,
        "data": "",
        "raw_log": "expected 4, got 3",
    }
    assert answers.parse_broadcast(answer({"tx_response": sent})) == Broadcast(
        32, "sdk", "expected 4, got 3"
    )
    included = sent | {"height": "99", "code": 0, "codespace": "", "data": "0A", "raw_log": "[]"}
    assert answers.parse_transaction(
        answer({"tx": {}, "tx_response": included})
    ) == IncludedTransaction(99, 0, "", "[]", "0A")


def moved_by(*events):
    response = {
        "height": "99",
        "code": 0,
        "codespace": "",
        "data": "",
        "raw_log": "[]",
        "logs": [{"events": list(events)}],
    }
    return answers.parse_transaction(answer({"tx_response": response})).moved


def bank(type_, *pairs):
    return {"type": type_, "attributes": [{"key": key, "value": value} for key, value in pairs]}


def test_moved_coins_are_read_from_bank_events():
    spent = bank(
        "coin_spent",
        ("spender", "us"),
        ("amount", "7ujkl,5uatom"),
        ("spender", "pool"),
        ("amount", "3ujkl"),
    )
    received = bank(
        "coin_received",
        ("receiver", "pool"),
        ("amount", "7ujkl"),
        ("receiver", "us"),
        ("amount", "2ujkl"),
    )
    assert moved_by(spent, bank("transfer", ("sender", "us"), ("amount", "7ujkl")), received) == {
        "us": -5,
        "pool": 4,
    }
    assert moved_by(bank("coin_spent", ("spender", "us"), ("amount", ""))) == {"us": 0}
    assert moved_by(
        {"type": "coin_spent", "attributes": [{"key": "spender", "value": "us"}, {"key": "amount"}]}
    ) == {"us": 0}


@pytest.mark.parametrize(
    "event", [None, 5, {"type": "coin_spent"}, {"type": "coin_spent", "attributes": [{"key": 1}]}]
)
def test_invalid_events_are_ignored(event):
    assert moved_by(event) is None
    assert moved_by() == {}


def test_an_account_that_vests_is_read_like_a_plain_one():
    plain = {"account_number": "7", "sequence": "3"}
    assert answers.parse_account(
        answer({"account": {"base_vesting_account": {"base_account": plain}}})
    ) == Account(7, 3)


def test_a_plan_is_read_from_camel_case_with_nine_decimals():
    value = {
        "storage_payment_info": {
            "spaceAvailable": "1000",
            "spaceUsed": "1200",
            "end": "2027-01-02T03:04:05.123456789Z",
        }
    }
    plan = answers.parse_plan(answer(value))
    assert plan == StoragePlan(1000, 1200, datetime(2027, 1, 2, 3, 4, 5, 123456, tzinfo=UTC))
    assert plan.free_bytes == 0


def test_a_provider_that_registered_nonsense_as_its_space_offers_none():
    assert (
        answers.parse_provider(
            answer({"address": "a", "ip": "b", "totalspace": "much"})
        ).total_bytes
        == 0
    )


@pytest.mark.parametrize(
    ("pagination", "key"),
    [
        ({"next_key": None, "total": "0"}, None),
        ({"next_key": "AAE="}, "AAE="),
        ({"next_key": ""}, None),
        (None, None),
        ({}, None),
    ],
)
def test_the_next_page_is_named_by_its_key(pagination, key):
    assert answers.parse_next_key(answer({"pagination": pagination})) == key


@pytest.mark.parametrize(
    ("value", "refusal"),
    [
        ({"code": 5, "message": "not found", "details": []}, Refusal(5, "not found")),
        ({"code": "5", "message": "not found"}, None),
        ({"message": "not found"}, None),
        ([], None),
    ],
)
def test_error_is_recognized_by_its_shape(value, refusal):
    assert answers.parse_refusal(value) == refusal


@pytest.mark.parametrize("value", [None, 5, "x", [], {}, {"file": None}])
def test_invalid_file_raises(value):
    with pytest.raises(ChainUnreachable, match="query of a file"):
        answers.parse_file(ChainAnswer(value, "query of a file"))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("merkle", "not base64!"),
        ("merkle", "YQ"),
        ("merkle", "-__-AA=="),
        ("start", 1234),
        ("start", "12.5"),
        ("start", ""),
        ("start", "1" * 20),
        ("start", "١"),
        ("file_size", None),
        ("max_proofs", True),
        ("owner", 7),
        ("proofs", None),
        ("proofs", "x"),
        ("proofs", [1]),
        ("note", {}),
    ],
)
def test_a_member_of_the_wrong_kind_is_named(name, wrong):
    with pytest.raises(ChainUnreachable, match=f"q: .*'{name}'"):
        answers.parse_file(answer(FILE | {name: wrong}))


def test_a_list_that_is_missing_is_not_an_empty_one():
    for value in ({}, {"files": None}, {"files": {}}):
        with pytest.raises(ChainUnreachable, match="'files'"):
            answer(value).objects("files")
    assert answer({"files": []}).objects("files") == []


@pytest.mark.parametrize("time", ["", "yesterday", 5, "2026-13-01T00:00:00Z"])
def test_invalid_time_raises(time):
    header = {"chain_id": "c", "height": "5", "time": time}
    with pytest.raises(ChainUnreachable, match="'time'"):
        answers.parse_block(answer({"block": {"header": header}}))


def test_transaction_without_a_block_is_an_invalid_answer():
    response = {"height": "0", "code": 0, "codespace": "", "raw_log": "", "data": ""}
    with pytest.raises(ChainUnreachable, match="height 0"):
        answers.parse_transaction(answer({"tx_response": response}))


@pytest.mark.parametrize(
    ("version", "verifies"),
    [
        *(
            (version, True)
            for version in (
                "5.1.0",
                "v5.1.0",
                "5.1",
                "5.1.1-rc1",
                "5.1.0+dirty",
                " 5.10.2 ",
                "6.0.0",
                "10.0.0",
            )
        ),
        *(
            (version, False)
            for version in (
                "5.0.1",
                "v5.0.9",
                "5.1.0-rc1",
                "4.9.0",
                "",
                "main",
                "5",
                "5.1.x",
                "\u0665.1.0",
            )
        ),
    ],
)
def test_type_3_needs_a_readable_recent_version(version, verifies):
    assert answers.verifies_type_3(version) is verifies
