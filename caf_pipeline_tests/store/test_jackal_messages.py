"""The chain's messages and answers as bytes.

The transactions' bytes were made by mospy-wallet 0.6.0 on protobuf 7.36.2, with messages described to it by their field
numbers: `Transaction(account=Account(seed_phrase=WORDS, hrp="jkl", slip44=118, account_number=17, next_sequence=…), gas=…,
chain_id="jackal-1")`, `set_fee(…, "ujkl")`, `add_raw_msg(…)`, `_tx_body.timeout_height = …`, `get_tx_bytes()`.
The shapes of answers without storage in them are those of a node of Cosmos SDK 0.45.
"""

import base64
import hashlib
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caf_pipeline.errors import ChainUnreachable, StoreError
from caf_pipeline.store.jackal import messages
from caf_pipeline.store.jackal.messages import (
    Account,
    Broadcast,
    ChainAnswer,
    ChainFile,
    ChainMessage,
    IncludedTransaction,
    Provider,
    Refusal,
    StoragePlan,
    TransactionTerms,
    archive_note,
    archive_of,
    buy_storage,
    encode,
    job_id,
    post_file,
    post_starts,
    root_in_path,
    sign_transaction,
    transaction_hash,
    transaction_messages,
)
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline_tests.store.test_jackal_wallet import ADDRESS, WORDS

ROOT = bytes(range(64))
ONE_POST = (
    "0abf010ab8010a212f63616e696e655f636861696e2e73746f726167652e4d7367506f737446696c651292010a2a6a6b6c3139726c34636d32686d72386166"
    "79346b6c6470787a33666b61346a67757130613937727678321240000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2021"
    "22232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f188080808080012803300342177b226361665f706970656c696e65223a2261"
    "316232227d1887ad4b12660a500a460a1f2f636f736d6f732e63727970746f2e736563703235366b312e5075624b657912230a21024f4e2ad99c34d60b"
    "9ba6283c9431a8418af8673212961f97a77b6377fcd05b6212040a020801180512120a0c0a04756a6b6c12043330303010f093091a40fa909d1003df01"
    "ac8ebf85b9f4dad35034e3a0538ae281499bce8e8b2d5a914c26161afdff7d4888c4f86d93eb893ab50f2a0afa99680c743b9b7056b494b0a4"
)
PURCHASE_AND_POST = (
    "0ad2020a8d010a232f63616e696e655f636861696e2e73746f726167652e4d736742757953746f7261676512660a2a6a6b6c3139726c34636d32686d7238"
    "616679346b6c6470787a33666b61346a6775713061393772767832122a6a6b6c3139726c34636d32686d7238616679346b6c6470787a33666b61346a67"
    "75713061393772767832181e208094ebdc032a04756a6b6c0ab8010a212f63616e696e655f636861696e2e73746f726167652e4d7367506f737446696c"
    "651292010a2a6a6b6c3139726c34636d32686d7238616679346b6c6470787a33666b61346a67757130613937727678321240000102030405060708090a"
    "0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f1880808080800128"
    "03300342177b226361665f706970656c696e65223a2261316232227d1880808080802012650a4e0a460a1f2f636f736d6f732e63727970746f2e736563"
    "703235366b312e5075624b657912230a21024f4e2ad99c34d60b9ba6283c9431a8418af8673212961f97a77b6377fcd05b6212040a02080112130a0d0a"
    "04756a6b6c1205323030303010c0843d1a40d2c3d0a808860addfa189c2f5733d592954d9d0b901c167e08d9047d5c6f30326eb6bb93a50f8bd60cb764"
    "f5964682cd15543fb8db7050576bbdcd003f3fb879"
)
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


@pytest.fixture(scope="module")
def wallet():
    return Wallet(WORDS)


def a_post(wallet):
    return post_file(wallet.address, ROOT, 32 * 2**30, copies=3, proof_type=3, note=archive_note("a1b2"))


def test_a_post_is_signed_as_another_library_signs_it(wallet):
    body = sign_transaction(wallet, [a_post(wallet)], TransactionTerms("jackal-1", 17, 5, 1234567, 150_000, 3_000))
    assert body.hex() == ONE_POST
    assert transaction_hash(body) == "80ED9DDDDA30FBC7CD2EA196AA1608D96DAB553ED910776859D10F447A138F6F"


def test_a_first_transaction_of_two_messages_is_signed_as_another_library_signs_it(wallet):
    both = [buy_storage(wallet.address, 10**9, 30), a_post(wallet)]
    body = sign_transaction(wallet, both, TransactionTerms("jackal-1", 17, 0, 2**40, 1_000_000, 20_000))
    assert body.hex() == PURCHASE_AND_POST
    assert transaction_hash(body) == "59B0C727BEA5DCB84CB02BDF9110C6EBEC92D8D419FD585B830F5E1A0FA96FE3"
    assert transaction_messages(body) == both


def test_the_starts_of_posts_come_back_in_order():
    answers = [
        encode("MsgData", msg_type=messages.POST_FILE, data=encode("PostFileResponse", start_block=height)) for height in (77, 78)
    ]
    other = encode("MsgData", msg_type=messages.BUY_STORAGE)
    data = b"".join(b"\x0a" + bytes([len(one)]) + one for one in (answers[0], other, answers[1]))
    assert post_starts(data.hex().upper()) == [77, 78]


@pytest.mark.parametrize("data", ["zz", "0aff"])
def test_data_that_is_none_of_a_transaction_is_refused(data):
    with pytest.raises(StoreError):
        post_starts(data)


def test_a_root_stands_in_a_path_in_url_safe_base64_with_padding():
    assert root_in_path(b"\xfb\xff\xfe\x00") == "-__-AA=="


def test_a_job_is_named_by_root_sender_and_start():
    assert job_id(ROOT, ADDRESS, 1234) == hashlib.sha256(ROOT + ADDRESS.encode() + b"1234").hexdigest()


@given(st.text())
def test_the_archive_is_found_again_in_its_note(archive_id):
    assert archive_of(archive_note(archive_id)) == archive_id


@pytest.mark.parametrize("note", ["", "{}", "[]", "null", "x", '{"caf_pipeline":1}', "[" * 100_000])
def test_a_note_of_others_names_no_archive(note):
    assert archive_of(note) is None


# --- answers ---------------------------------------------------------------------------------------------------------


def answer(value):
    return ChainAnswer(value, "q")


def test_a_file_is_read_with_its_providers():
    file = messages.parse_file(answer(FILE | {"new": 1}))
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
    assert messages.parse_account(answer({"account": {"account_number": "7", "sequence": "3", "pub_key": None}})) == Account(7, 3)
    provider = {"address": "jkl1p", "ip": "https://p.example", "totalspace": "1000", "keybase_identity": ""}
    assert messages.parse_provider(answer(provider)) == Provider("jkl1p", "https://p.example", 1000)
    sent = {"height": "0", "txhash": "AB", "codespace": "sdk", "code": 32, "data": "", "raw_log": "expected 4, got 3"}
    assert messages.parse_broadcast(answer({"tx_response": sent})) == Broadcast(32, "sdk", "expected 4, got 3")
    included = sent | {"height": "99", "code": 0, "codespace": "", "data": "0A", "raw_log": "[]"}
    assert messages.parse_transaction(answer({"tx": {}, "tx_response": included})) == IncludedTransaction(99, 0, "", "[]", "0A")


def moved_by(*events):
    response = {"height": "99", "code": 0, "codespace": "", "data": "", "raw_log": "[]", "logs": [{"events": list(events)}]}
    return messages.parse_transaction(answer({"tx_response": response})).moved


def bank(type_, *pairs):
    return {"type": type_, "attributes": [{"key": key, "value": value} for key, value in pairs]}


def test_what_messages_moved_is_read_from_the_events_of_the_bank():
    spent = bank("coin_spent", ("spender", "us"), ("amount", "7ujkl,5uatom"), ("spender", "pool"), ("amount", "3ujkl"))
    received = bank("coin_received", ("receiver", "pool"), ("amount", "7ujkl"), ("receiver", "us"), ("amount", "2ujkl"))
    assert moved_by(spent, bank("transfer", ("sender", "us"), ("amount", "7ujkl")), received) == {"us": -5, "pool": 4}
    assert moved_by(bank("coin_spent", ("spender", "us"), ("amount", ""))) == {"us": 0}
    assert moved_by({"type": "coin_spent", "attributes": [{"key": "spender", "value": "us"}, {"key": "amount"}]}) == {"us": 0}


@pytest.mark.parametrize("event", [None, 5, {"type": "coin_spent"}, {"type": "coin_spent", "attributes": [{"key": 1}]}])
def test_events_that_are_none_tell_nothing_and_are_no_failure(event):
    assert moved_by(event) is None
    assert moved_by() == {}


def test_an_account_that_vests_is_read_like_a_plain_one():
    plain = {"account_number": "7", "sequence": "3"}
    assert messages.parse_account(answer({"account": {"base_vesting_account": {"base_account": plain}}})) == Account(7, 3)


def test_a_plan_is_read_from_camel_case_with_nine_decimals():
    value = {"storage_payment_info": {"spaceAvailable": "1000", "spaceUsed": "1200", "end": "2027-01-02T03:04:05.123456789Z"}}
    plan = messages.parse_plan(answer(value))
    assert plan == StoragePlan(1000, 1200, datetime(2027, 1, 2, 3, 4, 5, 123456, tzinfo=UTC))
    assert plan.free_bytes == 0


def test_a_provider_that_registered_nonsense_as_its_space_offers_none():
    assert messages.parse_provider(answer({"address": "a", "ip": "b", "totalspace": "much"})).total_bytes == 0


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
    assert messages.parse_next_key(answer({"pagination": pagination})) == key


@pytest.mark.parametrize(
    ("value", "refusal"),
    [
        ({"code": 5, "message": "not found", "details": []}, Refusal(5, "not found")),
        ({"code": "5", "message": "not found"}, None),
        ({"message": "not found"}, None),
        ([], None),
    ],
)
def test_an_error_is_told_by_its_shape(value, refusal):
    assert messages.parse_refusal(value) == refusal


@pytest.mark.parametrize("value", [None, 5, "x", [], {}, {"file": None}])
def test_what_is_no_file_is_no_answer_of_a_chain(value):
    with pytest.raises(ChainUnreachable, match="query of a file"):
        messages.parse_file(ChainAnswer(value, "query of a file"))


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
        messages.parse_file(answer(FILE | {name: wrong}))


def test_a_list_that_is_missing_is_not_an_empty_one():
    for value in ({}, {"files": None}, {"files": {}}):
        with pytest.raises(ChainUnreachable, match="'files'"):
            answer(value).objects("files")
    assert answer({"files": []}).objects("files") == []


@pytest.mark.parametrize("time", ["", "yesterday", 5, "2026-13-01T00:00:00Z"])
def test_what_is_no_time_is_no_answer_of_a_chain(time):
    header = {"chain_id": "c", "height": "5", "time": time}
    with pytest.raises(ChainUnreachable, match="'time'"):
        messages.parse_block(answer({"block": {"header": header}}))


def test_a_transaction_in_no_block_is_no_answer_of_a_chain():
    response = {"height": "0", "code": 0, "codespace": "", "raw_log": "", "data": ""}
    with pytest.raises(ChainUnreachable, match="height 0"):
        messages.parse_transaction(answer({"tx_response": response}))


def test_the_message_names_its_type(wallet):
    assert isinstance(a_post(wallet), ChainMessage)
    assert a_post(wallet).type_url == "/canine_chain.storage.MsgPostFile"


@pytest.mark.parametrize(
    ("version", "verifies"),
    [
        *((version, True) for version in ("5.1.0", "v5.1.0", "5.1", "5.1.1-rc1", "5.1.0+dirty", " 5.10.2 ", "6.0.0", "10.0.0")),
        *((version, False) for version in ("5.0.1", "v5.0.9", "5.1.0-rc1", "4.9.0", "", "main", "5", "5.1.x", "\u0665.1.0")),
    ],
)
def test_versions_from_5_1_0_on_verify_type_3_and_what_is_not_readable_does_not(version, verifies):
    assert messages.verifies_type_3(version) is verifies
