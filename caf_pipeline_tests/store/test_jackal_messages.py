"""The chain's messages as bytes.

mospy-wallet 0.6.0 on protobuf 7.36.2 made the expected transactions. Its messages were described by
field number: `Transaction(account=Account(seed_phrase=WORDS, hrp="jkl", slip44=118,
account_number=17, next_sequence=…), gas=…, chain_id="jackal-1")`, `set_fee(…, "ujkl")`,
`add_raw_msg(…)`, `_tx_body.timeout_height = …`, `get_tx_bytes()`.
"""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caf_pipeline.errors import StoreError
from caf_pipeline.store.jackal import messages
from caf_pipeline.store.jackal.messages import (
    ChainMessage,
    TransactionTerms,
    buy_storage,
    encode,
    post_file,
    post_starts,
    sign_transaction,
    transaction_messages,
)
from caf_pipeline.store.jackal.names import (
    archive_note,
    archive_of,
    job_id,
    root_in_path,
    transaction_hash,
)
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline_tests.support.jackal_network import ADDRESS, WORDS

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


@pytest.fixture(scope="module")
def wallet():
    return Wallet(WORDS)


def a_post(wallet):
    return post_file(
        wallet.address, ROOT, 32 * 2**30, copies=3, proof_type=3, note=archive_note("a1b2")
    )


def test_a_post_is_signed_as_another_library_signs_it(wallet):
    body = sign_transaction(
        wallet, [a_post(wallet)], TransactionTerms("jackal-1", 17, 5, 1234567, 150_000, 3_000)
    )
    assert body.hex() == ONE_POST
    assert (
        transaction_hash(body) == "80ED9DDDDA30FBC7CD2EA196AA1608D96DAB553ED910776859D10F447A138F6F"
    )


def test_two_message_transaction_matches_another_library(wallet):
    both = [buy_storage(wallet.address, 10**9, 30), a_post(wallet)]
    body = sign_transaction(
        wallet, both, TransactionTerms("jackal-1", 17, 0, 2**40, 1_000_000, 20_000)
    )
    assert body.hex() == PURCHASE_AND_POST
    assert (
        transaction_hash(body) == "59B0C727BEA5DCB84CB02BDF9110C6EBEC92D8D419FD585B830F5E1A0FA96FE3"
    )
    assert transaction_messages(body) == both


def test_the_starts_of_posts_come_back_in_order():
    answers = [
        encode(
            "MsgData",
            msg_type=messages.POST_FILE,
            data=encode("PostFileResponse", start_block=height),
        )
        for height in (77, 78)
    ]
    other = encode("MsgData", msg_type=messages.BUY_STORAGE)
    data = b"".join(b"\x0a" + bytes([len(part)]) + part for part in (answers[0], other, answers[1]))
    assert post_starts(data.hex().upper()) == [77, 78]


@pytest.mark.parametrize("data", ["zz", "0aff"])
def test_invalid_transaction_data_is_refused(data):
    with pytest.raises(StoreError):
        post_starts(data)


def test_path_has_root_in_padded_url_safe_base64():
    assert root_in_path(b"\xfb\xff\xfe\x00") == "-__-AA=="


def test_a_job_is_named_by_root_sender_and_start():
    assert (
        job_id(ROOT, ADDRESS, 1234) == hashlib.sha256(ROOT + ADDRESS.encode() + b"1234").hexdigest()
    )


@given(st.text())
def test_the_archive_is_found_again_in_its_note(archive_id):
    assert archive_of(archive_note(archive_id)) == archive_id


@pytest.mark.parametrize("note", ["", "{}", "[]", "null", "x", '{"caf_pipeline":1}', "[" * 100_000])
def test_a_note_of_others_names_no_archive(note):
    assert archive_of(note) is None


def test_the_message_names_its_type(wallet):
    assert isinstance(a_post(wallet), ChainMessage)
    assert a_post(wallet).type_url == "/canine_chain.storage.MsgPostFile"
