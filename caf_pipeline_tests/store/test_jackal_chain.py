"""Chain nodes that fail, lag, halt or answer nonsense: failover and errors."""

import base64
import contextlib
import json
import re
import socket
import threading
from datetime import datetime

import pytest

from caf_pipeline.errors import (
    ChainBehind,
    ChainHalted,
    ChainUnreachable,
    EmptyWallet,
    SettingsError,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.store.jackal import nodes as nodes_module
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.names import archive_note
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline_tests.support.scripted_lcd import (
    CHAIN_ID,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    ScriptedAnswer,
    ScriptedLcd,
)

OWNER = "jkl1owner"
ROOT = b"\xfb\xff" * 32
IN_PATH = base64.urlsafe_b64encode(ROOT).decode()


class Heights:
    """Stores the greatest height, as a ledger does."""

    def __init__(self, height=0):
        self.height = height

    def see(self, height):
        self.height = max(self.height, height)


@pytest.fixture
def heights():
    return Heights()


@pytest.fixture
def open_chain(heights):
    """Opens a chain over nodes' addresses with short waits, and closes it at the end."""
    with contextlib.ExitStack() as stack:

        def open_chain(*urls, **changes):
            quick = {"attempts": 2, "first_wait_seconds": 0.001, "silence_seconds": 5.0}
            chain = Chain(
                Nodes(
                    urls,
                    CHAIN_ID,
                    seen_height=lambda: heights.height,
                    see_height=heights.see,
                    **(quick | changes),
                )
            )
            return stack.enter_context(chain)

        yield open_chain


@pytest.fixture
def nodes():
    with ScriptedLcd() as first, ScriptedLcd() as second:
        yield first, second


@pytest.fixture
def node(nodes):
    return nodes[0]


@pytest.fixture
def chain(open_chain, node):
    return open_chain(node.url)


@pytest.fixture
def nobody():
    """An address without a listener."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def a_file(start=7, owner=OWNER, note=None, root=ROOT):
    return {
        "merkle": base64.b64encode(root).decode(),
        "owner": owner,
        "start": str(start),
        "expires": "0",
        "file_size": "1000",
        "proof_interval": "7200",
        "proof_type": "3",
        "proofs": [],
        "max_proofs": "3",
        "note": archive_note("a1") if note is None else note,
    }


def paged(*pages, name="files"):
    """Answers pages whose keys are their numbers in base64."""

    def answer(params):
        key = params.get("pagination.key")
        number = int(base64.b64decode(key)) if key else 0
        following = (
            base64.b64encode(str(number + 1).encode()).decode() if number + 1 < len(pages) else None
        )
        return ScriptedAnswer(
            {name: pages[number], "pagination": {"next_key": following, "total": "0"}}
        )

    return answer


# --- failover ---


def test_next_node_is_used_without_an_answer(open_chain, nobody, node):
    assert open_chain(nobody, node.url).height() == 100


def test_the_first_node_is_preferred(open_chain, nodes):
    first, second = nodes
    chain = open_chain(first.url, second.url + "/")
    assert (chain.height(), chain.height()) == (100, 100)
    assert second.asked == []


def test_a_node_that_failed_is_asked_last_for_a_while(open_chain, nodes):
    first, second = nodes
    first.answers["params"] = ScriptedAnswer(b"<html>Bad Gateway</html>", 502)
    second.answers["params"] = ScriptedAnswer({"params": {"proof_window": "50"}})
    chain = open_chain(first.url, second.url)
    assert [chain.proof_window() for _ in range(3)] == [50] * 3
    assert first.asked.count("params") == 1


def test_with_no_node_that_answers_the_error_names_them_all(open_chain, nobody, node):
    node.answers["blocks/latest"] = ScriptedAnswer(b"<html>", 502)
    with pytest.raises(ChainUnreachable) as unreachable:
        open_chain(nobody, node.url).height()
    assert nobody in str(unreachable.value)
    assert node.url in str(unreachable.value)
    assert not unreachable.value.permanent
    assert unreachable.value.hint


def test_a_failure_that_passes_is_not_seen(open_chain, node):
    answers = [
        ScriptedAnswer({"code": 14, "message": "try again", "details": []}, 503),
        ScriptedAnswer({"params": {"proof_window": "9"}}),
    ]
    node.answers["params"] = lambda _: answers.pop(0)
    assert open_chain(node.url).proof_window() == 9


@pytest.mark.parametrize(
    "urls", [[], [""], ["localhost:1317"], ["ftp://a"], ["http://"], ["http://a:b"]]
)
def test_invalid_node_address_is_a_settings_error(open_chain, urls):
    with pytest.raises(SettingsError, match=r"jackal\.lcd"):
        open_chain(*urls)


def test_no_address_names_the_page_and_the_folder_store(open_chain):
    with pytest.raises(SettingsError) as refused:
        open_chain()
    assert "docs/how-to/connect-jackal.md" in refused.value.hint
    assert 'kind = "directory"' in refused.value.hint


def test_a_node_of_another_chain_is_refused_at_once(open_chain, nodes):
    first, second = nodes
    first.chain_id = "other-1"
    with pytest.raises(SettingsError, match="of chain 'other-1', not of 'scripted-1'") as refused:
        open_chain(first.url, second.url).height()
    assert refused.value.permanent


# --- heights ---


def test_the_greatest_height_is_remembered(chain, node, heights):
    chain.height()
    node.height = 90
    with pytest.raises(ChainBehind, match=r"block 90, .* block 100 "):
        chain.height()
    assert heights.height == 100


def test_not_found_from_a_lagging_node_proves_nothing(chain, node, heights):
    heights.see(101)
    name = f"/cosmos/tx/v1beta1/txs/{'AB' * 32}"
    node.answers[name] = NOT_FOUND
    with pytest.raises(ChainBehind):
        chain.transaction("AB" * 32)
    assert name not in node.asked


def test_a_node_that_is_behind_is_passed_over(open_chain, nodes, heights):
    first, second = nodes
    heights.see(150)
    second.height = 150
    second.answers["files/merkle/" + IN_PATH] = ScriptedAnswer(
        {"files": [a_file()], "pagination": None}
    )
    chain = open_chain(first.url, second.url)
    assert [file.start for file in chain.files_of_root(ROOT)] == [7]
    assert f"files/merkle/{IN_PATH}" not in first.asked


def test_answer_from_an_older_state_is_refused(chain, node):
    node.answers["params"] = ScriptedAnswer(
        {"params": {"proof_window": "9"}}, headers={"Grpc-Metadata-X-Cosmos-Block-Height": "99"}
    )
    with pytest.raises(ChainBehind, match=r"block 99, .* block 100 "):
        chain.proof_window()
    node.answers["params"] = ScriptedAnswer(
        {"params": {"proof_window": "9"}}, headers={"Grpc-Metadata-X-Cosmos-Block-Height": "100"}
    )
    assert chain.proof_window() == 9


def account_at(height, sequence=8):
    """Answers an account from the state of a block."""
    account = {"account_number": "3", "sequence": str(sequence), "address": OWNER}
    return ScriptedAnswer(
        {"account": {"@type": "/cosmos.auth.v1beta1.BaseAccount"} | account},
        headers={"Grpc-Metadata-X-Cosmos-Block-Height": str(height)},
    )


def test_a_list_of_archives_is_never_older_than_the_sequence(open_chain, nodes):
    first, second = nodes
    first.answers[f"/cosmos/auth/v1beta1/accounts/{OWNER}"] = account_at(101)
    first.answers["files"] = ScriptedAnswer({}, 503)
    second.answers["files"] = paged([a_file(note=archive_note("a1"))])
    chain = open_chain(first.url, second.url)
    assert chain.account(OWNER).sequence == 8  # block 101 came after the node named block 100
    with pytest.raises(StoreUnreachable):
        chain.archives_of(OWNER)
    assert "files" not in second.asked
    second.height = 101
    assert chain.archives_of(OWNER) == {"a1": [7]}


def test_a_height_far_ahead_of_the_node_is_not_believed(chain, node, heights):
    node.answers[f"/cosmos/auth/v1beta1/accounts/{OWNER}"] = account_at(10**6)
    with pytest.raises(ChainUnreachable, match="1000000"):
        chain.account(OWNER)
    assert heights.height == 100


def test_the_height_of_a_transaction_counts_as_seen(chain, node, heights):
    response = {"height": "104", "code": 0, "codespace": "", "raw_log": "[]", "data": ""}
    node.answers["/cosmos/tx/v1beta1/txs/AB"] = ScriptedAnswer({"tx_response": response})
    assert chain.transaction("AB").height == 104
    assert heights.height == 104


def test_old_newest_block_means_a_halted_chain(open_chain, nodes):
    first, second = nodes
    first.age = 7300
    with pytest.raises(ChainHalted, match=r"is 7\d{3} s old") as halted:
        open_chain(first.url).height()
    assert not halted.value.permanent
    assert open_chain(first.url, second.url).height() == 100


def test_an_answer_from_a_cache_counts_with_its_age(chain, node):
    node.answers["blocks/latest"] = ScriptedAnswer(node.block(100).body, headers={"Age": "7200"})
    with pytest.raises(ChainHalted):
        chain.height()


def test_slow_blocks_are_no_halt(chain, node):
    node.age, node.block_seconds = 400, 60
    assert chain.height() == 100


def test_the_time_between_blocks_is_measured_once(chain, node):
    node.block_seconds = 2.5
    assert chain.block_seconds() == pytest.approx(2.5, rel=0.05)
    assert chain.block_seconds() == pytest.approx(2.5, rel=0.05)
    assert node.asked.count("blocks/1") == 1


@pytest.mark.parametrize("height", [1, 100])
def test_unmeasurable_chain_has_the_default_block_time(chain, node, height):
    node.height = height
    node.answers["blocks/1"] = ScriptedAnswer(
        {"code": 3, "message": "height 1 is not available", "details": []}, 400
    )
    assert chain.block_seconds() == 6.0


# --- answers ---


@pytest.mark.parametrize(
    "told",
    [
        ScriptedAnswer(b"<html>moved</html>"),
        ScriptedAnswer(b""),
        ScriptedAnswer(b"\xff\xfe"),
        ScriptedAnswer(b"[" * 100_000),
        ScriptedAnswer(b'{"params":{"proof_window":"9"}}', cut=10),
        ScriptedAnswer(
            b"{}", status=302, headers={"Location": "/jackal/canine-chain/storage/elsewhere"}
        ),
        ScriptedAnswer({"params": {"proof_window": 9}}),
        ScriptedAnswer({"code": 5, "message": "not found"}, 200),
        ScriptedAnswer({"code": 2, "message": "panic"}, 500),
    ],
)
def test_nonsensical_answer_raises(chain, node, told):
    node.answers["params"] = told
    node.answers["elsewhere"] = ScriptedAnswer({"params": {"proof_window": "9"}})
    with pytest.raises(ChainUnreachable, match=r"params|broke"):
        chain.proof_window()
    assert "elsewhere" not in node.asked


def test_a_long_answer_is_not_read_to_its_end(chain, node, monkeypatch):
    monkeypatch.setattr(nodes_module, "ANSWER_BYTES", 100_000)
    node.answers["params"] = ScriptedAnswer(b"[" + b" " * 200_000 + b"]")
    with pytest.raises(ChainUnreachable, match="longer than 100000 bytes"):
        chain.proof_window()


def test_silent_node_is_skipped(open_chain, node):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert open_chain(url, node.url, silence_seconds=2).height() == 100


def test_unknown_file_is_none(chain, node):
    node.answers[f"files/{IN_PATH}/{OWNER}/7"] = NOT_FOUND
    node.answers[f"files/{IN_PATH}/{OWNER}/8"] = ScriptedAnswer({"file": a_file(8)})
    node.answers[f"files/merkle/{IN_PATH}"] = paged([a_file(8)])
    assert chain.file(ROOT, OWNER, 7) is None
    assert chain.file(ROOT, OWNER, 8).start == 8


def test_not_found_needs_the_list_of_the_root(chain, node):
    node.answers[f"files/{IN_PATH}/{OWNER}/7"] = NOT_FOUND
    node.answers[f"files/merkle/{IN_PATH}"] = paged([a_file(6), a_file(7)])
    assert chain.file(ROOT, OWNER, 7).start == 7


def test_foreign_404_does_not_count_as_unknown_file(chain, node):
    node.answers[f"files/{IN_PATH}/{OWNER}/7"] = ScriptedAnswer(b"<html>nginx</html>", 404)
    with pytest.raises(ChainUnreachable):
        chain.file(ROOT, OWNER, 7)
    node.answers[f"files/{IN_PATH}/{OWNER}/7"] = ScriptedAnswer({"error": "no such route"}, 404)
    with pytest.raises(ChainUnreachable, match="status 404"):
        chain.file(ROOT, OWNER, 7)


def test_unposted_root_has_no_files(chain, node):
    node.answers[f"files/merkle/{IN_PATH}"] = NOT_FOUND
    assert chain.files_of_root(ROOT) == []


def test_an_answer_without_a_list_is_not_an_empty_list(chain, node):
    node.answers[f"files/merkle/{IN_PATH}"] = ScriptedAnswer({})
    with pytest.raises(ChainUnreachable, match="'files'"):
        chain.files_of_root(ROOT)


def test_files_of_another_root_do_not_count(chain, node):
    node.answers[f"files/merkle/{IN_PATH}"] = ScriptedAnswer(
        {"files": [a_file(root=b"x" * 32), a_file(9)], "pagination": None}
    )
    assert [file.start for file in chain.files_of_root(ROOT)] == [9]


def test_a_wallet_that_never_received_anything_is_empty(chain, node):
    node.answers[f"/cosmos/auth/v1beta1/accounts/{OWNER}"] = NOT_FOUND
    with pytest.raises(EmptyWallet, match=r"jkl1owner .* scripted-1"):
        chain.account(OWNER)


def test_missing_plan_is_none(chain, node):
    node.answers[f"payment_info/{OWNER}"] = NOT_FOUND
    assert chain.plan(OWNER) is None


def test_less_space_than_is_sold_has_no_price(chain, node):
    with pytest.raises(StoreError, match=r"for (29|30) days"):
        chain.price(29, 10**9)
    with pytest.raises(StoreError, match=r"for (29|30) days"):
        chain.price(30, 10**9 - 1)
    assert node.asked == []
    node.answers["price_check/30/1000000000"] = ScriptedAnswer({"price": "15"})
    assert chain.price(30, 10**9) == 15


# --- lists ---


def test_a_list_is_read_over_its_pages_empty_ones_included(chain, node):
    node.answers[f"files/merkle/{IN_PATH}"] = paged([a_file(1), a_file(2)], [], [a_file(3)])
    assert [file.start for file in chain.files_of_root(ROOT)] == [1, 2, 3]


def test_too_long_page_is_requested_in_smaller_pages(chain, node):
    """Files with long notes must not hide other wallets' files."""
    files = [a_file(start) | {"note": "x" * 1_000_000} for start in range(1, 30)]

    def pages(params):
        at, limit = int(params.get("pagination.key", "0")), int(params["pagination.limit"])
        following = at + limit if at + limit < len(files) else None
        return ScriptedAnswer(
            {
                "files": files[at : at + limit],
                "pagination": {"next_key": following and str(following)},
            }
        )

    node.answers[f"files/merkle/{IN_PATH}"] = pages
    assert [file.start for file in chain.files_of_root(ROOT)] == list(range(1, 30))


def test_a_single_file_that_is_too_long_ends_the_list(chain, node):
    node.answers[f"files/merkle/{IN_PATH}"] = ScriptedAnswer(
        {"files": [a_file(1) | {"note": "x" * 5_000_000}], "pagination": {"next_key": None}}
    )
    with pytest.raises(ChainUnreachable, match="longer than"):
        chain.files_of_root(ROOT)


def test_list_continues_at_another_node_after_a_failure(open_chain, nodes):
    first, second = nodes
    pages = paged([a_file(1)], [a_file(2)])
    first.answers[f"files/merkle/{IN_PATH}"] = lambda params: (
        ScriptedAnswer(b"", 502) if params.get("pagination.key") else pages(params)
    )
    second.answers[f"files/merkle/{IN_PATH}"] = pages
    assert [file.start for file in open_chain(first.url, second.url).files_of_root(ROOT)] == [1, 2]


def test_archive_files_need_its_note_and_our_owner(chain, node):
    foreign = [
        a_file(2, owner="jkl1other"),
        a_file(3, note=archive_note("a2")),
        a_file(4, note="{}"),
    ]
    node.answers["files/note/caf_pipeline/a1"] = paged([a_file(1), *foreign], [], [a_file(5)])
    assert [file.start for file in chain.files_of_archive(OWNER, "a1")] == [1, 5]


NO_HEIGHT = ScriptedAnswer(
    {
        "code": 3,
        "message": "type mismatch, parameter: start, error: a1 is not valid",
        "details": [],
    },
    400,
)


@pytest.mark.parametrize("refusal", [NOT_IMPLEMENTED, NOT_FOUND, NO_HEIGHT])
def test_without_a_query_by_note_all_files_are_gone_through(chain, node, refusal):
    node.answers["files/note/caf_pipeline/a1"] = refusal
    node.answers["files"] = paged([a_file(1)], [a_file(2, owner="jkl1other"), a_file(3)])
    assert [file.start for file in chain.files_of_archive(OWNER, "a1")] == [1, 3]


def test_an_archives_name_cannot_leave_its_place_in_the_path(chain, node):
    node.answers["files/note/caf_pipeline/a/../b?c"] = paged([])
    assert list(chain.files_of_archive(OWNER, "a/../b?c")) == []


def test_active_providers_are_read_from_all_pages(chain, node):
    active = [{"address": f"jkl1p{number}"} for number in range(3)]
    node.answers["active_providers"] = paged(active[:2], active[2:], name="providers")
    assert chain.active_providers() == {"jkl1p0", "jkl1p1", "jkl1p2"}
    node.answers["active_providers"] = ScriptedAnswer({"providers": []})
    assert not chain.active_providers()


def test_providers_come_with_their_registration(chain, node):
    registered = [
        {"address": f"jkl1p{number}", "ip": f"https://p{number}", "totalspace": "1000"}
        for number in range(3)
    ]
    node.answers["providers"] = paged(registered[:2], registered[2:], name="providers")
    assert [provider.url for provider in chain.providers()] == [
        "https://p0",
        "https://p1",
        "https://p2",
    ]


def a_proof(start, height, leaf=3, prover="jkl1p"):
    return {
        "prover": prover,
        "merkle": base64.b64encode(ROOT).decode(),
        "owner": OWNER,
        "start": str(start),
        "last_proven": str(height),
        "chunk_to_prove": str(leaf),
    }


def test_the_last_proof_is_found_in_the_providers_list(chain, node):
    node.answers["proofs/jkl1p"] = paged([a_proof(6, 1)], [a_proof(7, 88)], name="proofs")
    assert chain.proof("jkl1p", ROOT, OWNER, 7).last_proven == 88
    assert chain.proof("jkl1p", ROOT, OWNER, 9) is None
    assert node.asked.count(f"proofs/jkl1p/{IN_PATH}/{OWNER}/9") == 0  # refused once


def test_single_proof_query_is_used_if_supported(chain, node):
    node.answers[f"proofs/jkl1p/{IN_PATH}/{OWNER}/7"] = ScriptedAnswer({"proof": a_proof(7, 88)})
    assert chain.proof("jkl1p", ROOT, OWNER, 7).last_proven == 88


@pytest.mark.parametrize(
    "answer",
    [a_proof(6, 88), a_proof(7, 88, prover="jkl1q"), a_proof(7, 88) | {"owner": "jkl1other"}],
)
def test_proof_of_another_file_or_provider_is_ignored(chain, node, answer):
    node.answers[f"proofs/jkl1p/{IN_PATH}/{OWNER}/7"] = ScriptedAnswer({"proof": answer})
    node.answers["proofs/jkl1p"] = ScriptedAnswer({"proofs": [answer]})
    assert chain.proof("jkl1p", ROOT, OWNER, 7) is None


def test_only_a_drawn_leaf_shows_a_verified_proof(chain, node):
    for leaf, verified in (("0", False), ("12", True), (None, False), ("-1", False)):
        answer = {
            name: value
            for name, value in (a_proof(7, 88) | {"chunk_to_prove": leaf}).items()
            if value is not None
        }
        node.answers["proofs/jkl1p"] = ScriptedAnswer({"proofs": [answer]})
        assert chain.proof("jkl1p", ROOT, OWNER, 7).verified is verified


# --- the version of the software ---


def runs(node, version):
    software = {"version": version} if version is not None else None
    info = {"default_node_info": {"network": node.chain_id}, "application_version": software}
    node.answers["node_info"] = ScriptedAnswer(info)


@pytest.mark.parametrize("version", ["5.0.1", "", "main", None, "5.1.0-rc1"])
def test_only_type_3_is_refused_on_old_chains(chain, node, version):
    runs(node, version)
    with pytest.raises(SettingsError, match="proof_type is 3") as refused:
        chain.require_verified(3)
    assert "proof_type = 0" in refused.value.hint
    chain.require_verified(0)


def test_oldest_version_of_the_answering_nodes_counts(open_chain, nobody):
    with ScriptedLcd() as old, ScriptedLcd() as new:
        runs(new, "v5.1.0")
        runs(old, "5.0.1")
        with pytest.raises(SettingsError, match=re.escape(old.url)):
            open_chain(new.url, old.url).require_verified(3)
        open_chain(nobody, new.url).require_verified(3)
        with pytest.raises(ChainUnreachable):
            open_chain(nobody).require_verified(3)


# --- transactions ---

SENT = "/cosmos/tx/v1beta1/txs"


def test_a_transaction_is_sent_and_the_answer_is_the_nodes(chain, node):
    node.answers[SENT] = ScriptedAnswer(
        {
            "tx_response": {
                "code": 13,
                "codespace": "sdk",
                "raw_log": "insufficient fees",
                "data": "",
            }
        }
    )
    assert chain.broadcast(b"bytes").code == 13


def test_unanswered_broadcast_goes_to_the_next_node(open_chain, nodes):
    first, second = nodes
    first.answers[SENT] = ScriptedAnswer(b"{}", cut=0)
    second.answers[SENT] = ScriptedAnswer(
        {"tx_response": {"code": 0, "codespace": "", "raw_log": "[]", "data": ""}}
    )
    assert open_chain(first.url, second.url).broadcast(b"bytes").code == 0


def test_a_node_without_an_index_knows_no_transaction(chain, node):
    refusal = {"code": 2, "message": "transaction indexing is disabled", "details": []}
    node.answers["/cosmos/tx/v1beta1/txs/AB"] = ScriptedAnswer(refusal, 500)
    assert chain.transaction("AB") is None


def test_another_node_is_asked_where_the_first_keeps_no_index(open_chain, nodes):
    first, second = nodes
    first.answers["/cosmos/tx/v1beta1/txs/AB"] = ScriptedAnswer(
        {"code": 2, "message": "transaction indexing is disabled"}, 500
    )
    response = {"height": "90", "code": 0, "codespace": "", "raw_log": "[]", "data": ""}
    second.answers["/cosmos/tx/v1beta1/txs/AB"] = ScriptedAnswer({"tx_response": response})
    assert open_chain(first.url, second.url).transaction("AB").height == 90


def test_transaction_without_a_node_index_is_unknown(chain, node):
    node.answers["/cosmos/tx/v1beta1/txs/AB"] = ScriptedAnswer(
        {"code": 13, "message": "internal", "details": []}, 500
    )
    with pytest.raises(StoreUnreachable):
        chain.transaction("AB")


def test_threads_share_a_chain(chain, node):
    node.answers["params"] = ScriptedAnswer({"params": {"proof_window": "9"}})
    pages = []
    threads = [
        threading.Thread(target=lambda: pages.extend(chain.proof_window() for _ in range(20)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pages == [9] * 160


def test_error_has_the_query_and_a_short_quote(chain, node):
    node.answers["params"] = ScriptedAnswer(
        json.dumps({"params": {"proof_window": "x" * 10_000}}).encode()
    )
    with pytest.raises(ChainUnreachable) as unreachable:
        chain.proof_window()
    assert f"{node.url}/jackal/canine-chain/storage/params" in str(unreachable.value)
    assert len(str(unreachable.value)) < 300


def of_plan(end: str, start: str = "2026-01-02T00:00:00Z") -> ScriptedAnswer:
    plan = {"spaceAvailable": "1000", "spaceUsed": "0", "start": start, "end": end}
    return ScriptedAnswer({"storage_payment_info": plan})


PLAN_TIMES = {"start": "2026-01-02T00:00:00Z", "end": "2027-01-02T00:00:00Z"}


def confirmed(open_chain, nodes, name, times):
    """Return what is confirmed if each node says another start, or another end."""
    for node, time_ in zip(nodes, times, strict=True):
        node.answers[f"payment_info/{OWNER}"] = of_plan(**PLAN_TIMES | {name: time_})
    plan, _ = open_chain(*(node.url for node in nodes)).confirmed_plan(OWNER)
    return plan.starts_at if name == "start" else plan.ends_at


@pytest.mark.parametrize("liar", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("end", "2026-02-01T00:00:00Z"),
        ("end", "2029-02-01T00:00:00Z"),
        ("start", "2026-12-02T00:00:00Z"),
    ],
)
def test_one_lying_node_changes_no_confirmed_time(open_chain, nodes, liar, name, lie):
    right = PLAN_TIMES[name]
    times = [lie if number == liar else right for number in range(3)]
    with ScriptedLcd() as third:
        time = confirmed(open_chain, [*nodes, third], name, times)
    assert time == datetime.fromisoformat(right)


@pytest.mark.parametrize("name", ["start", "end"])
def test_earlier_of_two_times_counts(open_chain, nodes, name):
    right = PLAN_TIMES[name]
    times = [right.replace("-01-", "-12-"), right]
    assert confirmed(open_chain, nodes, name, times) == datetime.fromisoformat(right)


def test_a_node_that_is_behind_confirms_no_end(open_chain, nodes, heights):
    first, second = nodes
    heights.height, first.height = 100, 90
    first.answers[f"payment_info/{OWNER}"] = of_plan("2026-02-01T00:00:00Z")
    second.answers[f"payment_info/{OWNER}"] = of_plan("2027-01-02T00:00:00Z")
    plan, _ = open_chain(first.url, second.url).confirmed_plan(OWNER)
    assert plan.ends_at.year == 2027
