"""Hostile chain nodes and providers: each query ends in time and in bounded memory.

It returns a correct value or raises one error of the store. Timeouts are shortened here, and
nothing is measured by the clock: an endless query would hang the test.
"""

import base64
import contextlib
import itertools
import json
import subprocess
import sys

import pytest

from caf_pipeline.errors import (
    ChainUnreachable,
    IntegrityError,
    SettingsError,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.records import PostRecord
from caf_pipeline.store.jackal import provider as provider_module
from caf_pipeline.store.jackal import provider_http
from caf_pipeline.store.jackal.answers import FileProof
from caf_pipeline.store.jackal.chain import MAX_LIST_ENTRIES, Chain
from caf_pipeline.store.jackal.names import archive_note
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline.store.jackal.provider import ProviderClient, Sending
from caf_pipeline_tests.support.hostile_answers import ENDLESS, NO_OBJECT, SLOW, WRONG, bent
from caf_pipeline_tests.support.jackal_stores import open_store
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.peak_memory import peak_bytes
from caf_pipeline_tests.support.scripted_lcd import CHAIN_ID, ScriptedAnswer, ScriptedLcd
from caf_pipeline_tests.support.scripted_provider import answer, scripted
from caf_pipeline_tests.support.tiers import sampled

OWNER, PROVIDER, HASH = "jkl1owner", "jkl1provider", "AB" * 32
ROOT = b"\xfb\xff" * 32
IN_PATH = base64.urlsafe_b64encode(ROOT).decode()
MOST_BYTES = 192 << 20  # beyond the program and its libraries, whose memory depends on the machine
FILE = {
    "merkle": base64.b64encode(ROOT).decode(),
    "owner": OWNER,
    "start": "7",
    "expires": "0",
    "file_size": "1000",
    "proof_interval": "7200",
    "proof_type": "3",
    "proofs": [f"{PROVIDER}/{OWNER}/00/7/"],
    "max_proofs": "3",
    "note": archive_note("a1"),
}
FILES = {"files": [FILE], "pagination": {"next_key": None, "total": "1"}}
PROOF = {"merkle": FILE["merkle"], "owner": OWNER, "start": "7", "last_proven": "50"}
PLAN = {"spaceAvailable": "9", "spaceUsed": "2", "end": "2030-01-01T00:00:00.123456789Z"}
SENT = {"code": 0, "codespace": "", "raw_log": ""}

PARAMS = {"params": {"proof_window": "9", "price_per_tb_per_month": "15"}}
QUERIES = {
    "height": ("blocks/latest", None, lambda chain: chain.height()),
    "block_seconds": ("blocks/1", None, lambda chain: chain.block_seconds()),
    "params": ("params", PARAMS, lambda chain: chain.proof_window()),
    "account": (
        f"/cosmos/auth/v1beta1/accounts/{OWNER}",
        {"account": {"base_account": {"account_number": "1", "sequence": "2"}}},
        lambda chain: chain.account(OWNER),
    ),
    "balance": (
        f"/cosmos/bank/v1beta1/balances/{OWNER}/by_denom",
        {"balance": {"denom": "ujkl", "amount": "5"}},
        lambda chain: chain.balance(OWNER),
    ),
    "plan": (
        f"payment_info/{OWNER}",
        {"storage_payment_info": PLAN},
        lambda chain: chain.plan(OWNER),
    ),
    "price": ("price_check/30/1000000000", {"price": "7"}, lambda chain: chain.price(30, 10**9)),
    "list_price": ("params", PARAMS, lambda chain: chain.list_price()),
    "file": (
        f"files/{IN_PATH}/{OWNER}/7",
        {"file": FILE},
        lambda chain: chain.file(ROOT, OWNER, 7),
    ),
    "files_of_root": (f"files/merkle/{IN_PATH}", FILES, lambda chain: chain.files_of_root(ROOT)),
    "files_of_archive": (
        "files/note/caf_pipeline/a1",
        FILES,
        lambda chain: list(chain.files_of_archive(OWNER, "a1")),
    ),
    "providers": (
        "providers",
        {
            "providers": [{"address": PROVIDER, "ip": "http://p.example", "totalspace": "9"}],
            "pagination": {"next_key": ""},
        },
        lambda chain: chain.providers(),
    ),
    "active_providers": (
        "active_providers",
        {"providers": [{"address": PROVIDER}], "pagination": None},
        lambda chain: chain.active_providers(),
    ),
    "last_proven": (
        f"proofs/{PROVIDER}/{IN_PATH}/{OWNER}/7",
        {"proof": PROOF},
        lambda chain: chain.proof(PROVIDER, ROOT, OWNER, 7),
    ),
    "proofs": (
        f"proofs/{PROVIDER}",
        {"proofs": [PROOF], "pagination": {"next_key": None}},
        lambda chain: chain.proof(PROVIDER, ROOT, OWNER, 7),
    ),
    "broadcast": (
        "/cosmos/tx/v1beta1/txs",
        {"tx_response": SENT},
        lambda chain: chain.broadcast(b"signed"),
    ),
    "transaction": (
        f"/cosmos/tx/v1beta1/txs/{HASH}",
        {"tx_response": SENT | {"height": "9", "data": "", "txhash": HASH}},
        lambda chain: chain.transaction(HASH),
    ),
}


@contextlib.contextmanager
def opened(url, *, silence_seconds=30.0, answer_seconds=60.0, **limits):
    """A chain over one node, with one attempt."""
    request_count = [0]

    def see(height):
        request_count[0] = max(request_count[0], height)

    quick = {"attempts": 1, "silence_seconds": silence_seconds, "answer_seconds": answer_seconds}
    with Chain(
        Nodes([url], CHAIN_ID, seen_height=lambda: request_count[0], see_height=see, **quick),
        **limits,
    ) as chain:
        yield chain


def good(node, name):
    """Answer a query correctly."""
    place, right, _ = QUERIES[name]
    if right is None:
        return json.loads(
            (node.block(1) if place == "blocks/1" else node.block(node.height)).content()
        )
    return right


@pytest.fixture
def node():
    with ScriptedLcd() as node:
        for name, (place, _, _) in QUERIES.items():
            if place not in ("blocks/latest", "blocks/1") and name != "proofs":
                node.answers[place] = ScriptedAnswer(good(node, name))
        yield node


# --- a chain node's bytes ---


def test_every_query_has_a_right_answer_here(node):
    """Otherwise the tests below would prove nothing."""
    with opened(node.url) as chain:
        for name, (_, _, ask) in QUERIES.items():
            assert ask(chain) is not None, name
            assert ask(chain) != [], name


def in_its_place(node, hostile, place):
    """Let a raw server answer one path, and redirect all others to the node."""

    def reply(request, sock):
        request.body()
        if place is None or request.path.partition("?")[0].endswith(place):
            hostile(request, sock)
            return
        path = request.path.removeprefix("/jackal/canine-chain/storage/").removeprefix(
            "/cosmos/base/tendermint/v1beta1/"
        )
        scripted_answer = node.answers.get(path.partition("?")[0]) or node._of_itself(
            path.partition("?")[0]
        )
        sock.sendall(answer(scripted_answer.status, scripted_answer.content(), Connection="close"))

    return reply


KINDS = {"endless": ENDLESS, "slow": SLOW, "wrong": WRONG, "JSON": NO_OBJECT}
BYTES = {
    f"{kind}: {name}": hostile for kind, kinds in KINDS.items() for name, hostile in kinds.items()
}
SAMPLE = {f"{kind}: {next(iter(kinds))}" for kind, kinds in KINDS.items()}
SAMPLED = [
    pytest.param(name, marks=pytest.mark.sample) if name in SAMPLE else name for name in BYTES
]
PLACES = {
    "at once": (None, "params"),
    "in the end": ("/params", "params"),
    "in a list": ("/providers", "providers"),
}


SHORT = {"silence_seconds": 0.25, "answer_seconds": 0.3}
GROUP, FAULT = "Hostile input", "answers of chain nodes and providers"


@pytest.mark.parametrize("name", SAMPLED)
def test_hostile_bytes_of_a_node_raise_one_error(name, node, fault):
    for place, query in PLACES.values():
        with (
            fault(GROUP, FAULT),
            scripted(in_its_place(node, BYTES[name], place)) as script,
            opened(script.url, **SHORT) as chain,
        ):
            with pytest.raises(StoreUnreachable) as caught:
                QUERIES[query][2](chain)
            assert len(str(caught.value)) < 1000
            assert str(caught.value).isprintable()


def test_a_slow_node_is_passed_over_for_the_next(node):
    with scripted(SLOW["interim answers"]) as script:
        chain = Chain(
            Nodes(
                [script.url, node.url],
                CHAIN_ID,
                seen_height=lambda: 0,
                see_height=lambda _: None,
                answer_seconds=2,
            )
        )
        with chain:
            assert chain.proof_window() == 9


# --- a chain node's JSON ---


@pytest.mark.parametrize("name", sampled(QUERIES, every=4))
def test_hostile_answers_give_one_error_or_a_valid_value(name, node):
    place, _, ask = QUERIES[name]
    right = good(node, name)
    if name == "proofs":
        node.answers.pop(QUERIES["last_proven"][0])
    with opened(node.url) as chain:
        usual = type(ask(chain)) if name != "proofs" else FileProof
        for variant in bent(right):
            node.answers[place] = ScriptedAnswer(json.dumps(variant).encode())
            chain._nodes._block_seconds = (6.0, 0.0)  # forgets the measurement
            try:
                value = ask(chain)
            except (
                StoreError,
                SettingsError,
            ) as error:  # settings: the node reports another chain
                value, message = None, str(error)
            else:
                message = ""
            assert message.isprintable(), variant
            assert value is None or isinstance(value, usual), variant


def test_a_name_that_comes_twice_is_taken_once(node):
    node.answers["params"] = ScriptedAnswer(
        b'{"params":{"proof_window":"x","proof_window":"9"},"params":{"proof_window":"7"}}'
    )
    with opened(node.url) as chain:
        assert chain.proof_window() == 7


# --- lists ---

LISTS = {
    "files_of_root": f"files/merkle/{IN_PATH}",
    "files_of_archive": "files/note/caf_pipeline/a1",
    "providers": "providers",
    "active_providers": "active_providers",
    "proofs": f"proofs/{PROVIDER}",
}


def page_of(name, count, key):
    """Return a page of `count` entries like the correct one, and the key of the next page."""
    right = QUERIES[name][1]
    member = next(iter(right))
    return ScriptedAnswer({member: right[member] * count, "pagination": {"next_key": key}})


def without_match(name, reply):
    """Replace all matching entries, so that the list is read to its end."""
    return ScriptedAnswer(
        json.loads(json.dumps(reply.body).replace('"start": "7"', '"start": "8"'))
    )


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("count", [0, 1])
def test_pages_without_end_have_an_end(name, count, node):
    numbers = itertools.count()
    node.answers.pop(QUERIES["last_proven"][0])
    node.answers[LISTS[name]] = lambda params: without_match(
        name, page_of(name, count, f"key{next(numbers)}")
    )
    with opened(node.url, max_pages=12) as chain, pytest.raises(ChainUnreachable):
        QUERIES[name][2](chain)
    assert next(numbers) <= 12


@pytest.mark.parametrize("name", LISTS)
def test_a_page_that_leads_to_itself_is_asked_for_once(name, node):
    node.answers.pop(QUERIES["last_proven"][0])
    node.answers[LISTS[name]] = lambda params: without_match(name, page_of(name, 0, "same"))
    with opened(node.url) as chain, pytest.raises(ChainUnreachable, match="came twice"):
        QUERIES[name][2](chain)


def test_pages_that_take_too_long_together_have_an_end(node):
    numbers = itertools.count()
    node.answers["providers"] = lambda params: page_of("providers", 0, f"key{next(numbers)}")
    with (
        opened(node.url, list_seconds=0.2) as chain,
        pytest.raises(ChainUnreachable, match=r"more than 0\.2 s"),
    ):
        chain.providers()


def test_where_a_page_begins_has_a_limit(node):
    node.answers["providers"] = lambda params: page_of("providers", 0, "k" * 100_000)
    with (
        opened(node.url) as chain,
        pytest.raises(ChainUnreachable, match="100000 characters") as caught,
    ):
        chain.providers()
    assert len(str(caught.value)) < 1000


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["files_of_root", "providers", "active_providers"])
def test_a_list_that_is_kept_has_a_limit(name, node):
    numbers = itertools.count()
    node.answers[LISTS[name]] = lambda params: page_of(name, 5000, f"key{next(numbers)}")
    with opened(node.url) as chain, pytest.raises(ChainUnreachable, match="entries"):
        QUERIES[name][2](chain)
    assert next(numbers) <= MAX_LIST_ENTRIES // 5000 + 1


@pytest.mark.thorough
def test_posts_of_our_root_by_strangers_do_not_hide_ours(node):
    """Any wallet may post a root as often as it pays."""
    pages = [
        [FILE | {"owner": "jkl1stranger", "start": str(page * 500 + n)} for n in range(500)]
        for page in range(60)
    ]

    def reply(params):
        number = int(params.get("pagination.key", "0"))
        last = number == len(pages) - 1
        page = [*pages[number], FILE] if last else pages[number]
        return ScriptedAnswer(
            {"files": page, "pagination": {"next_key": None if last else str(number + 1)}}
        )

    node.answers[LISTS["files_of_root"]] = reply
    node.answers[QUERIES["file"][0]] = ScriptedAnswer({"code": 5, "message": "not found"}, 404)
    with opened(node.url) as chain:
        assert [file.start for file in chain.files_of_root(ROOT, OWNER)] == [7]
        assert chain.file(ROOT, OWNER, 7).owner == OWNER


# --- a provider's bytes ---

POSTING = PostRecord(ROOT[:32], OWNER, 7, 3_000_000)


class UploadControl:
    def check(self):
        pass

    def piece_bytes(self):
        return 1 << 20

    def sent(self, size_bytes):
        pass


def upload(client, path):
    posting = PostRecord(ROOT[:32], OWNER, 7, path.stat().st_size)
    return client.upload(
        Sending(posting, path, UploadControl(), proof_type=3, answer_seconds=0.3, sent_before=True)
    )


@contextlib.contextmanager
def client_of(*replies):
    """Yield a server with these replies, and a client of it."""
    with (
        scripted(*replies) as script,
        contextlib.closing(ProviderClient(script.url, may_be_private=True)) as client,
    ):
        yield script, client


@contextlib.contextmanager
def short_limits():
    """Shorten the time limits of providers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provider_http, "ANSWER_SECONDS", 0.3)
        for name in ("ANSWER_SECONDS", "PROBE_SECONDS", "STALL_SECONDS"):
            patch.setattr(provider_module, name, 0.3)
        patch.setattr(provider_module, "RESUME_SECONDS", (0.0, 0.0, 0.0))
        patch.setattr(provider_module, "MAX_RESUMED", 1)
        yield


@pytest.fixture
def short():
    with short_limits():
        yield


@pytest.fixture
def staged(tmp_path):
    path = tmp_path / "staged.caf"
    path.write_bytes(bytes(2_000_000))
    return path


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", SAMPLED)
def test_hostile_bytes_of_a_provider_raise_one_error(name, staged, fault):
    queries = {
        "version": lambda client: client.version(),
        "free_bytes": lambda client: client.free_bytes(),
        "job": lambda client: client.job(POSTING),
        "upload": lambda client: upload(client, staged),
        "download": lambda client: b"".join(client.download(POSTING, 10, 2_000_000)),
    }
    for what, ask in queries.items():
        with (
            fault(GROUP, FAULT),
            client_of(BYTES[name]) as (_, client),
        ):
            try:
                value = ask(client)
            except (
                StoreUnreachable,
                IntegrityError,
            ) as error:  # integrity: the file has another size
                value, message = None, str(error)
            else:
                message = ""
            assert len(message) < 1000, what
            assert message.isprintable(), what
            # Version and free space are optional. A web server may answer 200 to everything, and
            # send any number of bytes: only the requested number is read, and the reader checks
            # their hash.
            assert (
                value in ("", None)
                or what == "upload"
                or (what == "download" and len(value) == 2_000_000 - 10)
            ), what


@pytest.mark.usefixtures("short")
def test_provider_text_has_no_control_characters(staged):
    evil = json.dumps(
        {
            "error": "\x1b[2J\r\nok \u202e",
            "progress": 5,
            "status": "Error: \x1b[2J\n\u202e",
            "version": "\x07\n",
        }
    )
    with client_of(answer(500, evil)) as (_, client):
        with pytest.raises(StoreUnreachable) as caught:
            upload(client, staged)
        assert str(caught.value).isprintable()
    with client_of(answer(200, evil)) as (_, client):
        assert client.job(POSTING).error.isprintable()
        assert client.version().isprintable()


@pytest.mark.parametrize(
    "progress", ["NaN", "1e999", "-1e999", "true", '"100"', "[]", "9" * 4000, "null"]
)
def test_invalid_progress_raises(progress):
    with scripted(answer(200, f'{{"progress":{progress},"status":"x"}}')) as script:
        client = ProviderClient(script.url, may_be_private=True)
        try:
            job = client.job(POSTING)
        except StoreUnreachable:
            return
        assert progress == "true"
        assert not job.done


# --- downloads ---


@pytest.mark.thorough
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "content_range",
    [
        "",
        "bytes",
        "bytes 10-19/*",
        "bytes 0-9/3000000",
        "bytes 19-10/3000000",
        "bytes 10-19/" + "9" * 5000,
        "bytes -5-19/3000000",
        "items 10-19/3000000",
        "bytes 10-19/1",
    ],
)
def test_a_range_that_makes_no_sense_is_not_taken(content_range):
    with scripted(answer(206, b"x" * 10, Content_Range=content_range)) as script:
        client = ProviderClient(script.url, may_be_private=True)
        with pytest.raises((StoreUnreachable, IntegrityError)):
            b"".join(client.download(POSTING, 10, 20))
        client.close()


def test_provider_that_breaks_off_each_byte_fails(monkeypatch):
    monkeypatch.setattr(provider_module, "RESUME_SECONDS", (0.0, 0.0, 0.0))

    def one_byte(request, sock):
        start = request.headers["range"].removeprefix("bytes=").partition("-")[0]
        content_range = f"bytes {start}-2999999/3000000"
        sock.sendall(answer(206, b"x", 3_000_000 - int(start), Content_Range=content_range))

    with scripted(one_byte) as script:
        client = ProviderClient(script.url, may_be_private=True)
        with pytest.raises(StoreUnreachable, match="broke off"):
            b"".join(client.download(POSTING, 0, 3_000_000))
    assert len(script.requests) == 3


def test_provider_with_one_byte_per_range_fails(monkeypatch):
    monkeypatch.setattr(provider_module, "RESUME_SECONDS", (0.0, 0.0, 0.0))

    with (
        client_of(_at_most(1)) as (script, client),
        pytest.raises(StoreUnreachable, match="2999997 bytes"),
    ):
        b"".join(client.download(POSTING, 0, 3_000_000))
    assert len(script.requests) == 3


def test_large_partial_ranges_are_resumed():
    with client_of(_at_most(600_000)) as (script, client):
        assert b"".join(client.download(POSTING, 0, 3_000_000)) == b"x" * 3_000_000
    assert len(script.requests) == 5


def _at_most(size_bytes):
    """Return an answer that sends and announces only the first bytes of each range."""

    def reply(request, sock):
        start = int(request.headers["range"].removeprefix("bytes=").partition("-")[0])
        end = min(start + size_bytes, 3_000_000)
        sock.sendall(
            answer(
                206,
                b"x" * (end - start),
                Content_Range=f"bytes {start}-{end - 1}/3000000",
                Connection="close",
            )
        )

    return reply


@pytest.mark.parametrize("given_bytes", [0, 100])  # before or after the first bytes
def test_a_provider_that_falls_silent_is_not_asked_again(monkeypatch, given_bytes):
    for name in ("ANSWER_SECONDS", "STALL_SECONDS"):
        monkeypatch.setattr(provider_module, name, 0.3)
    first_bytes = (
        answer(206, b"x" * given_bytes, 3_000_000, Content_Range="bytes 0-2999999/3000000")
        if given_bytes
        else b""
    )
    with (
        client_of(_then_silent(first_bytes)) as (script, client),
        pytest.raises(StoreUnreachable, match="in time"),
    ):
        b"".join(client.download(POSTING, 0, 3_000_000))
    assert len(script.requests) == 1


def test_provider_silent_after_many_bytes_is_asked_to_resume(monkeypatch):
    monkeypatch.setattr(provider_module, "STALL_SECONDS", 2.0)
    begun = answer(206, b"x" * 2_000_000, 3_000_000, Content_Range="bytes 0-2999999/3000000")

    def rest(request, sock):
        start = int(request.headers["range"].removeprefix("bytes=").partition("-")[0])
        assert start > 0
        sock.sendall(
            answer(206, b"x" * (3_000_000 - start), Content_Range=f"bytes {start}-2999999/3000000")
        )

    with client_of(_then_silent(begun), rest) as (script, client):
        assert b"".join(client.download(POSTING, 0, 3_000_000)) == b"x" * 3_000_000
    assert len(script.requests) == 2


def _then_silent(given):
    """Return an answer of these bytes, followed by silence until the client leaves."""

    def reply(_, sock):
        sock.sendall(given)
        sock.recv(1)

    return reply


# --- uploads ---


@pytest.mark.usefixtures("short")
def test_a_provider_that_reads_on_and_on_is_given_up(tmp_path):
    path = tmp_path / "large.caf"
    path.touch()
    with path.open("wb") as file:
        file.truncate(1 << 40)

    def swallow(request, sock):
        while sock.recv(1 << 20):
            pass

    with scripted(swallow) as script:
        client = ProviderClient(script.url, may_be_private=True)
        with pytest.raises(StoreUnreachable, match="in time"):
            upload(client, path)


def test_a_job_that_moves_for_ever_is_left(network, tmp_path):
    """A provider that always reports something new must not be polled for ever."""
    progress = itertools.cycle([1, 2])
    followed = []

    class Busy:
        url = "http://busy.example"

        def job(self, posting, check):
            followed.append(1)
            return provider_module.Job(next(progress), "busy")

    opened = open_store(network, upload_seconds=0.3, proof_seconds=0.3)
    try:
        path = tmp_path / "chunk.caf"
        path.write_bytes(b"x" * 1000)
        from caf_pipeline.store.jackal.upload import _Upload

        upload = _Upload(opened.store._uploads, opened.posted(path), path, ())
        assert not upload._final_state(Busy(), provider_module.Job(0, "")).done
    finally:
        opened.store.close()
    assert followed


# --- memory ---


def bytes_used_by(call):
    """Run a function of this module in a process; return the memory that it used."""
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import *; {call}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split()[-1])


def ask_everything(folder):
    """Try every hostile answer of nodes and providers in this process."""
    from pathlib import Path

    before = peak_bytes()
    staged = Path(folder, "staged.caf")
    staged.write_bytes(bytes(2_000_000))
    with ScriptedLcd() as node, short_limits():
        for name, hostile in BYTES.items():
            if name.startswith("slow") and not name.endswith("fast"):
                continue  # slow answers fill no memory
            with (
                scripted(in_its_place(node, hostile, "/params")) as script,
                opened(script.url, **SHORT) as chain,
                contextlib.suppress(StoreError),
            ):
                chain.proof_window()
            with (
                client_of(hostile) as (script, client),
            ):
                for ask in (
                    client.version,
                    lambda: upload(client, staged),
                    lambda: list(client.download(POSTING, 0, 2_000_000)),
                ):
                    with contextlib.suppress(StoreError, IntegrityError):
                        ask()
    print(peak_bytes() - before)


@pytest.mark.thorough
def test_memory_stays_bounded_whatever_is_answered(tmp_path):
    assert bytes_used_by(f"ask_everything({str(tmp_path)!r})") < MOST_BYTES


def ask_for_long_lists():
    """Read lists of 170,000 entries in pages of the maximum size."""
    before = peak_bytes()
    entries = {
        "files_of_root": FILE,
        "files_of_archive": FILE,
        "providers": QUERIES["providers"][1]["providers"][0],
    }
    with ScriptedLcd() as node:
        for name, entry in entries.items():
            member = "providers" if name == "providers" else "files"
            content = json.dumps(entry)
            contents = ",".join([content] * (3_900_000 // len(content)))
            page = f'{{"{member}":[{contents}],"pagination":{{"next_key":"KEY"}}}}'
            numbers = itertools.count()

            def reply(params, page=page, numbers=numbers):
                return ScriptedAnswer(page.replace("KEY", f"key{next(numbers)}").encode())

            node.answers[LISTS[name]] = reply
            with opened(node.url, max_pages=12) as chain, contextlib.suppress(StoreError):
                # Files of an archive are yielded one by one and not collected.
                queries = (
                    chain.files_of_archive(OWNER, "a1")
                    if name == "files_of_archive"
                    else QUERIES[name][2](chain)
                )
                print(sum(1 for _ in queries), file=sys.stderr)
    print(peak_bytes() - before)


@pytest.mark.thorough
def test_memory_stays_bounded_under_long_lists():
    assert bytes_used_by("ask_for_long_lists()") < MOST_BYTES
