"""The loopback providers match the table "Provider HTTP API" in the notes on Jackal's protocol.

The tests use raw requests and sockets.
"""

import base64
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.chain_user import (
    ChainUser,
    Post,
    client,  # noqa: F401 - a fixture
    own_network,
    random_content,
    user,  # noqa: F401 - a fixture
)
from caf_pipeline_tests.support.jackal_network import ADDRESS

TEXT = "text/plain; charset=utf-8"
MIB = 1 << 20

# Answers of a real provider.
NO_JOB = {"error": "could not job from id"}
NO_SLOT = {"error": "cannot accept file that I cannot claim"}
WRONG_SIZE = "cannot accept file that doesn't match the chain data 5000 != 4000"
UNKNOWN_ROOT = {"error": "cannot get cid mapping from disk: Key not found"}


def upload_body(
    post: Post, *, names: tuple[str, ...] = ("sender", "merkle", "start", "file"), end: bool = True
) -> bytes:
    """Return a form with these parts in this order. Its boundary is `cut`."""
    parts = []
    for name in names:
        head = f'--cut\r\nContent-Disposition: form-data; name="{name}"'
        value = post.content if name == "file" else post.form[name].encode()
        parts.append(
            head.encode()
            + (b'; filename="x"' if name == "file" else b"")
            + b"\r\n\r\n"
            + value
            + b"\r\n"
        )
    return b"".join(parts) + (b"--cut--\r\n" if end else b"")


FORM = {"Content-Type": "multipart/form-data; boundary=cut"}


def send(user: ChainUser, path: str, content: bytes, **headers: str) -> httpx.Response:
    return user.client.post(
        user.network.providers[0] + path, content=content, headers=FORM | headers
    )


def talk(user: ChainUser, *pieces: bytes, until: bytes = b"") -> bytes:
    """Send pieces on a new socket, and return the answer up to its end or `until`."""
    address = urlsplit(user.network.providers[0])
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        for piece in pieces:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        return receive(connection, until)


def receive(connection: socket.socket, until: bytes = b"") -> bytes:
    received = b""
    while not (until and until in received) and (piece := connection.recv(65536)):
        received += piece
    return received


# --- valid uploads ---


@pytest.mark.parametrize("proof_type", [0, 3])
def test_the_first_version_stores_and_answers_with_the_file(user, proof_type):
    post = user.post(random_content(50_000), proof_type=proof_type)
    for _ in range(2):
        answer = user.upload(post, version=1)
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, TEXT)
        assert answer.text.endswith("\n")
        expected = {
            "merkle": base64.b64encode(post.root).decode(),
            "owner": ADDRESS,
            "start": post.start,
        }
        assert answer.json() == expected | {"cid": answer.json()["cid"]}
    user.network.advance(1)
    assert user.provers(post) == user.network.provider_addresses[:1]
    assert user.download(post.root).content == post.content


@pytest.mark.parametrize("proof_type", [0, 3])
def test_the_second_version_accepts_when_all_is_done(user, proof_type):
    post = user.post(random_content(50_000), proof_type=proof_type)
    assert user.status(post).status_code == 404
    for _ in range(2):
        answer = user.upload(post, type=None)
        assert (answer.status_code, answer.headers["Content-Type"], answer.json()) == (
            202,
            TEXT,
            {"job_id": post.job},
        )
        done = user.status(post)
        assert (done.status_code, done.headers["Content-Type"]) == (200, TEXT)
        expected = {
            "merkle": base64.b64encode(post.root).decode(),
            "owner": ADDRESS,
            "start": post.start,
        }
        assert done.json() == expected | {
            "cid": done.json()["cid"],
            "progress": 100,
            "status": "done!",
        }


def test_job_is_unknown_before_the_body_is_complete(user):
    post = user.post(random_content(200_000))
    body = upload_body(post)
    address = urlsplit(user.network.providers[0])
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        head = (
            "POST /v2/upload HTTP/1.1\r\nHost: x\r\nContent-Type: "
            f"{FORM['Content-Type']}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body[:-10])
        unknown = user.status(post)
        assert (unknown.status_code, unknown.json()) == (404, NO_JOB)
        connection.sendall(body[-10:])
        assert b" 202 " in receive(connection, b"job_id")


def test_second_post_of_a_root_needs_its_own_upload(user):
    post = user.post(random_content(5000))
    user.upload(post)
    again = user.post(post.content)
    user.network.advance(5)
    assert (len(user.provers(post)), user.provers(again)) == (1, [])
    user.upload(again)
    user.network.advance(1)
    assert len(user.provers(again)) == 1


# --- invalid uploads ---

REFUSED: list[tuple[str, dict[str, Any], tuple[int, str], tuple[int, str]]] = [
    # fault, change to the form, answer of version 1, job of version 2
    (
        "other owner",
        {"sender": "jkl1somebody"},
        (
            500,
            r"failed to find file on chain with merkle: [0-9a-f]{64}, owner: jkl1somebody, .*not "
            r"found",
        ),
        (10, r"Error: No such file on chain"),
    ),
    (
        "other start",
        {"start": "1"},
        (500, r"failed to find file on chain .*"),
        (10, r"Error: No such file on chain"),
    ),
    (
        "upper case",
        {"merkle": "upper"},
        (500, r"cannot accept file that doesn't match the chain data [0-9a-f]{64} != [0-9a-f]{64}"),
        (30, r"Error: Merkle does not match"),
    ),
    (
        "wrong bytes",
        {"content": b"something else"},
        (500, r"failed to write file to disk: merkle does not match [0-9a-f]{64} != [0-9a-f]{64}"),
        (40, r"Error: Could not write file to disk merkle does not match .*"),
    ),
]


def changed(post: Post, changes: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the changed fields for this post, and their job."""
    changes = changes | (
        {"merkle": post.root.hex().upper()} if changes.get("merkle") == "upper" else {}
    )
    owner, start = changes.get("sender", post.owner), int(changes.get("start", post.start))
    return changes, replace(post, owner=owner, start=start).job


@pytest.mark.parametrize(
    ("changes", "first", "second"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_an_upload_that_is_not_what_was_posted_is_refused(user, changes, first, second):
    post = user.post(random_content(5000))
    changes, job = changed(post, changes)
    answer = user.upload(post, version=1, **changes)
    assert (answer.status_code, answer.headers["Content-Type"]) == (first[0], TEXT)
    assert re.fullmatch(first[1], answer.json()["error"])
    assert user.upload(post, **changes).status_code == 202
    status = user.client.get(f"{user.network.providers[0]}/v2/status/{job}").json()
    assert status["progress"] == second[0]
    assert re.fullmatch(second[1], status["status"])
    user.network.advance(5)
    assert (user.provers(post), user.download(post.root).status_code) == ([], 500)


def test_upload_without_a_free_slot_is_refused(user):
    post = user.post(random_content(500), copies=1)
    user.upload(post, 0)
    user.network.advance(1)
    answer = user.upload(post, 1, version=1)
    assert (answer.status_code, answer.json()) == (
        500,
        NO_SLOT,
    )
    user.upload(post, 1)
    assert user.status(post, 1).json()["status"] == "Error: Can't claim"
    assert user.upload(post, 0, version=1).status_code == 200


def test_wrong_size_is_stored_by_both_upload_versions(user):
    first_post, other = (user.post(random_content(5000), size_bytes=4000) for _ in range(2))
    answer = user.upload(first_post, version=1)
    assert (answer.status_code, answer.json()["error"]) == (
        500,
        WRONG_SIZE,
    )
    assert user.upload(other).status_code == 202
    assert (user.status(other).json()["progress"], user.status(other).json()["status"]) == (
        100,
        "done!",
    )
    user.network.advance(5)
    for post in (first_post, other):
        assert (len(user.provers(post)), user.download(post.root).content) == (1, post.content)


# --- downloads ---


@pytest.fixture(scope="module")
def stored(network: LoopbackNetwork, client: httpx.Client) -> Post:
    """A file of 1,000,000 bytes at the first provider."""
    network.misbehave(halted=True)
    user = ChainUser(network, client)
    post = user.post(random_content(1_000_000))
    user.upload(post)
    return post


RANGES = [
    ("bytes=0-0", 0, 1),
    ("bytes=100-199", 100, 200),
    ("bytes=999990-", 999_990, 1_000_000),
    ("bytes=-10", 999_990, 1_000_000),
    ("bytes=-2000000", 0, 1_000_000),
    ("bytes=500000-9999999", 500_000, 1_000_000),
]


@pytest.mark.parametrize(("wanted", "start", "end"), RANGES)
def test_a_range_is_served_as_it_is_asked_for(user, stored, wanted, start, end):
    answer = user.download(stored.root, Range=wanted)
    assert (answer.status_code, answer.content) == (206, stored.content[start:end])
    assert answer.headers["Content-Range"] == f"bytes {start}-{end - 1}/1000000"
    assert answer.headers["Accept-Ranges"] == "bytes"


def test_a_range_behind_the_end_is_416_in_plain_text(user, stored):
    answer = user.download(stored.root, Range="bytes=1000000-")
    assert (answer.status_code, answer.headers["Content-Type"]) == (416, TEXT)
    assert answer.headers["Content-Range"] == "bytes */1000000"


def test_an_unknown_root_is_an_error_of_the_server(user):
    answer = user.download(b"\x01" * 32)
    assert (answer.status_code, answer.headers["Content-Type"]) == (500, TEXT)
    assert answer.json() == UNKNOWN_ROOT
    assert user.client.get(f"{user.network.providers[0]}/download/xyz").status_code == 500


# --- deletion ---


def test_deleting_one_of_two_posts_takes_the_bytes_of_both(user):
    first = user.post(random_content(5000))
    second = user.post(first.content)
    for post in (first, second):
        user.upload(post)
    user.network.advance(1)
    used = user.network.state()["plans"][ADDRESS]["used_bytes"]
    user.do(user.delete_message(first))
    assert used - user.network.state()["plans"][ADDRESS]["used_bytes"] == 15_000
    assert (user.storage(first.path).status_code, len(user.provers(second))) == (404, 1)
    assert user.download(second.root).status_code == 500
    user.network.advance(200)
    assert user.provers(second) == []


# --- limits ---


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChainUser]:
    """A user of providers that answer within half a second or never.

    They forget jobs immediately.
    """
    with own_network(
        tmp_path_factory.mktemp("impatient"), reply_seconds=0.5, job_seconds=0
    ) as user:
        yield user
        user.network.well_behaved()


@pytest.mark.parametrize("version", [1, 2])
def test_late_upload_is_stored_without_an_answer(impatient, version):
    user = impatient
    post = user.post(random_content(2 * MIB))
    user.network.misbehave(provider=0, upload_rate=2 * MIB)
    with pytest.raises(httpx.RemoteProtocolError):
        user.upload(post, version=version)
    user.network.advance(1)
    assert user.provers(post) == user.network.provider_addresses[:1]
    assert post.root.hex() in user.network.state()["providers"][0]["roots"]


def test_a_download_ends_short_after_the_reply_s_time(impatient):
    user = impatient
    post = user.post(random_content(2 * MIB))
    user.network.misbehave(provider=0, upload_rate=0, download_rate=2 * MIB)
    with suppress(httpx.RemoteProtocolError):  # on a busy machine this answer may be late, too
        user.upload(post)
    request = f"GET /download/{post.root.hex()} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    head, _, body = talk(user, request).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(post.content)}".encode() in head
    assert len(body) < len(post.content)
    assert post.content.startswith(body)


# --- misbehaviour ---


def test_dropped_upload_leaves_nothing_for_the_ordered_count(user):
    post = user.post(random_content(3 * MIB))
    user.network.misbehave(provider=0, drop_upload_after=MIB, times=1)
    with pytest.raises(httpx.TransportError):
        user.upload(post)
    assert user.download(post.root).status_code == 500
    assert user.upload(post).status_code == 202


@pytest.mark.parametrize("version", [1, 2])
def test_an_upload_can_be_stored_and_never_answered(user, version):
    post = user.post(random_content(5000))
    user.network.misbehave(provider=0, drop_reply=True)
    with pytest.raises(httpx.RemoteProtocolError):
        user.upload(post, version=version)
    user.network.advance(1)
    assert len(user.provers(post)) == 1
    assert user.status(post).status_code == (200 if version == 2 else 404)


@pytest.mark.parametrize("flipped", [70_000, -1])
def test_wrong_bytes_can_be_served(user, flipped):
    post = user.post(random_content(200_000))
    user.upload(post)
    user.network.misbehave(provider=0, flip_byte=flipped)
    got = user.download(post.root).content
    wrong = [n for n in range(len(got)) if got[n] != post.content[n]]
    assert wrong == ([flipped] if flipped >= 0 else list(range(200_000)))
    assert (user.download(post.root, Range="bytes=0-99").content == post.content[:100]) is (
        flipped >= 0
    )


def test_restart_forgets_jobs_but_proves_bytes(user):
    post = user.post(random_content(5000))
    user.upload(post)
    user.network.kill()
    user.network.start()
    assert user.status(post).status_code == 404
    user.network.advance(1)
    assert len(user.provers(post)) == 1


def test_uploads_are_counted_by_provider_and_by_root(user):
    post = user.post(random_content(5000))
    before = user.network.state()["providers"]
    user.upload(post, 0)
    user.upload(post, 1)
    user.upload(post, 1, content=b"wrong")
    state = user.network.state()
    counted = [
        (new["uploads"] - old["uploads"])
        for old, new in zip(before, state["providers"], strict=True)
    ]
    begun = [
        (new["uploads_begun"] - old["uploads_begun"])
        for old, new in zip(before, state["providers"], strict=True)
    ]
    assert (counted[:2], begun[:2], state["uploads_by_root"][post.root.hex()]) == (
        [1, 1],
        [1, 2],
        2,
    )
