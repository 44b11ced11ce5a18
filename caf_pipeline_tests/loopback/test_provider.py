"""The loopback providers match the table "Provider HTTP API" in the notes on Jackal's protocol.

The tests use raw requests and sockets.
"""

import base64
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from email.parser import BytesParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.chain_user import ChainUser, Post, random_content
from caf_pipeline_tests.support.jackal_network import ADDRESS, FUNDS, SPACE

TEXT = "text/plain; charset=utf-8"
MIB = 1 << 20

# Answers of a real provider.
NO_JOB = {"error": "could not job from id"}
NO_SLOT = {"error": "cannot accept file that I cannot claim"}
WRONG_SIZE = "cannot accept file that doesn't match the chain data 5000 != 4000"
UNKNOWN_ROOT = {"error": "cannot get cid mapping from disk: Key not found"}
DISK_FULL = "Error: Could not write file to disk no space left on device"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60, verify=False) as client:
        yield client


@pytest.fixture
def user(network: LoopbackNetwork, client: httpx.Client) -> ChainUser:
    """A user of a chain that makes blocks only on order."""
    network.misbehave(halted=True)
    return ChainUser(network, client)


@contextmanager
def own_network(folder: Path, **options: Any) -> Iterator[ChainUser]:
    settings = {
        "fund": {ADDRESS: FUNDS},
        "space": {ADDRESS: SPACE},
        "block_seconds": 0.1,
        "providers": 2,
    }
    with (
        LoopbackNetwork(folder, **settings | options) as network,
        httpx.Client(timeout=60, verify=False) as client,
    ):
        network.misbehave(halted=True)
        yield ChainUser(network, client)


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
    jobs = user.client.get(user.network.providers[0] + "/api/jobs")
    assert jobs.headers["Content-Type"] == "application/json"
    assert post.job in [job["id"] for job in jobs.json()["jobs"]]


@pytest.mark.parametrize(
    "names",
    [
        ("file", "start", "merkle", "sender"),
        ("sender", "file", "merkle", "start"),
        ("start", "sender", "merkle", "file"),
    ],
)
def test_parts_come_in_any_order(user, names):
    post = user.post(random_content(5000))
    assert send(user, "/v2/upload", upload_body(post, names=names)).status_code == 202
    assert user.status(post).json()["status"] == "done!"


def test_chunked_uploads_and_expectations_are_understood(user):
    post = user.post(random_content(300_000))
    body = upload_body(post)
    pieces = iter([body[at : at + 70_000] for at in range(0, len(body), 70_000)])
    assert (
        user.client.post(
            f"{user.network.providers[0]}/v2/upload", content=pieces, headers=FORM
        ).status_code
        == 202
    )
    head = (
        f"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Type: {FORM['Content-Type']}\r\nExpect: "
        "100-continue\r\n"
    )
    body = upload_body(post, names=("type", "sender", "merkle", "start", "file"))
    answer = talk(user, f"{head}Content-Length: {len(body)}\r\n\r\n".encode(), body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


def test_no_route_looks_at_the_method(user):
    post = user.post(random_content(5000))
    put = user.client.put(
        f"{user.network.providers[0]}/v2/upload", content=upload_body(post), headers=FORM
    )
    assert put.status_code == 202
    assert (
        user.client.post(f"{user.network.providers[0]}/download/{post.root.hex()}").content
        == post.content
    )


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


@pytest.mark.parametrize("path", ["/upload", "/v2/upload"])
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"merkle": "xyz"}, "cannot parse merkle"),
        ({"merkle": "abc"}, "cannot parse merkle"),
        ({"start": "soon"}, "cannot parse start"),
    ],
)
def test_a_field_that_cannot_be_read_is_a_bad_request(user, path, changes, error):
    answer = user.upload(
        user.post(random_content(500)), version=2 if "v2" in path else 1, **changes
    )
    assert (answer.status_code, error in answer.json()["error"]) == (400, True)


def test_the_first_version_alone_reads_the_type(user):
    post = user.post(random_content(500))
    assert user.upload(post, version=1, type="three").status_code == 400
    assert user.upload(post, version=1, type=None).status_code == 500
    assert user.upload(post, version=2, type="three").status_code == 202
    assert user.status(post).json()["status"] == "done!"


@pytest.mark.parametrize("path", ["/upload", "/v2/upload"])
def test_incomplete_form_is_a_bad_request(user, path):
    post = user.post(random_content(5000))
    plain = user.client.post(user.network.providers[0] + path, content=b"hello")
    fileless = send(user, path, upload_body(post, names=("sender", "merkle", "start")))
    truncated = send(user, path, upload_body(post, end=False))
    assert [answer.status_code for answer in (plain, fileless, truncated)] == [400, 400, 400]
    assert plain.json()["error"].startswith("cannot parse form ")
    assert "no file found" in fileless.json()["error"]
    assert truncated.json()["error"].endswith("NextPart: EOF")


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
    ("bytes= 5-9 , ,", 5, 10),
]


@pytest.mark.parametrize(("wanted", "start", "end"), RANGES)
def test_a_range_is_served_as_it_is_asked_for(user, stored, wanted, start, end):
    answer = user.download(stored.root, Range=wanted)
    assert (answer.status_code, answer.content) == (206, stored.content[start:end])
    assert answer.headers["Content-Range"] == f"bytes {start}-{end - 1}/1000000"
    assert answer.headers["Accept-Ranges"] == "bytes"


def test_a_whole_file_has_neither_etag_nor_time(user, stored):
    answer = user.download(stored.root)
    assert (answer.status_code, answer.content) == (200, stored.content)
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert not {"ETag", "Last-Modified"} & answer.headers.keys()


def test_if_range_gets_everything(user, stored):
    answer = user.download(stored.root, **{"Range": "bytes=0-9", "If-Range": '"etag"'})
    assert (answer.status_code, len(answer.content)) == (200, 1_000_000)


def test_several_ranges_come_as_parts(user, stored):
    answer = user.download(stored.root, Range="bytes=0-4,-5,100-104")
    assert answer.status_code == 206
    assert int(answer.headers["Content-Length"]) == len(answer.content)
    head = f"Content-Type: {answer.headers['Content-Type']}\r\n\r\n".encode()
    parts = BytesParser().parsebytes(head + answer.content).get_payload()
    assert [part["Content-Range"] for part in parts] == [
        "bytes 0-4/1000000",
        "bytes 999995-999999/1000000",
        "bytes 100-104/1000000",
    ]
    for start, end in ((0, 5), (999_995, 1_000_000), (100, 105)):
        assert stored.content[start:end] in answer.content


@pytest.mark.parametrize(
    ("wanted", "error", "names_size"),
    [
        ("bytes=1000000-", "invalid range: failed to overlap\n", True),
        ("bytes=9-5", "invalid range\n", False),
        ("bytes=x-", "invalid range\n", False),
        ("lines=1-2", "invalid range\n", False),
    ],
)
def test_a_range_that_cannot_be_is_416_in_plain_text(user, stored, wanted, error, names_size):
    answer = user.download(stored.root, Range=wanted)
    assert (answer.status_code, answer.headers["Content-Type"], answer.text) == (416, TEXT, error)
    assert answer.headers.get("Content-Range") == ("bytes */1000000" if names_size else None)


def test_ranges_that_are_more_than_the_file_get_the_file(user, stored):
    assert user.download(stored.root, Range="bytes=0-,0-").status_code == 200


def test_head_tells_the_length(user, stored):
    answer = user.client.head(f"{user.network.providers[0]}/download/{stored.root.hex()}")
    assert (answer.status_code, answer.headers["Content-Length"], answer.content) == (
        200,
        "1000000",
        b"",
    )


def test_an_unknown_root_is_an_error_of_the_server(user):
    answer = user.download(b"\x01" * 32)
    assert (answer.status_code, answer.headers["Content-Type"]) == (500, TEXT)
    assert answer.json() == UNKNOWN_ROOT
    assert user.client.get(f"{user.network.providers[0]}/download/xyz").status_code == 500


def test_an_unknown_path_is_404_in_plain_text(user):
    answer = user.client.get(f"{user.network.providers[0]}/v3/upload")
    assert (answer.status_code, answer.headers["Content-Type"], answer.text) == (
        404,
        TEXT,
        "404 page not found\n",
    )


def test_a_provider_names_itself_and_its_chain(user):
    url = user.network.providers[1]
    assert user.client.get(url).json() == {
        "status": "online",
        "address": user.network.provider_addresses[1],
    }
    assert user.client.get(f"{url}/version").json()["chain-id"] == user.network.chain_id
    assert user.client.get(f"{url}/api/client/space").json()["total_space"] == 1 << 40


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


def test_deletion_damages_files_with_the_same_beginning(user):
    beginning = random_content(3 * MIB)
    gone, kept = (user.post(beginning + tail) for tail in (b"one", b"other"))
    for post in (gone, kept):
        user.upload(post)
    user.network.advance(1)
    user.do(user.delete_message(gone))
    with pytest.raises(httpx.RemoteProtocolError):
        user.download(kept.root)
    rest = user.download(kept.root, Range=f"bytes={2 * MIB}-")
    assert (rest.status_code, rest.content) == (206, kept.content[2 * MIB :])
    user.upload(kept)
    assert user.download(kept.root).content == kept.content


# --- limits ---


def test_too_slow_upload_is_cut_and_not_stored(tmp_path):
    with own_network(tmp_path, upload_seconds=0.5) as user:
        post = user.post(random_content(2 * MIB))
        user.network.misbehave(provider=0, upload_rate=MIB)
        with pytest.raises(httpx.TransportError):
            user.upload(post)
        user.network.advance(5)
        assert (user.status(post).status_code, user.provers(post)) == (404, [])
        assert list((tmp_path / "provider-0" / "uploads").iterdir()) == []


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


def test_successful_jobs_are_forgotten_and_failed_ones_kept(impatient):
    user = impatient
    well, failed = (user.post(random_content(100)) for _ in range(2))
    for post, content in ((well, well.content), (failed, b"other")):
        with suppress(httpx.RemoteProtocolError):
            user.upload(post, content=content)
    assert [user.status(post).status_code for post in (well, failed)] == [404, 200]


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


def test_job_can_be_done_without_a_proof(user):
    post = user.post(random_content(5000))
    user.network.misbehave(provider=0, never_prove=True)
    user.upload(post)
    user.network.advance(10)
    assert (user.status(post).json()["status"], user.provers(post)) == ("done!", [])


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


def test_a_download_can_end_anywhere(user):
    post = user.post(random_content(200_000))
    user.upload(post)
    user.network.misbehave(provider=0, cut_download_after=100_001)
    body = talk(
        user, f"GET /download/{post.root.hex()} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    ).partition(b"\r\n\r\n")[2]
    assert body == post.content[:100_001]


def test_provider_can_misbehave_in_each_way(user):
    post = user.post(random_content(5000))
    user.network.misbehave(provider=0, full=True)
    user.upload(post)
    assert user.status(post).json()["status"] == DISK_FULL
    user.network.misbehave(provider=0, full=False, error_status="eaten")
    user.upload(post)
    assert user.status(post).json()["status"] == "Error: eaten"
    user.network.misbehave(provider=0, error_status="", lose_jobs=True)
    user.upload(post)
    assert user.status(post).status_code == 404
    user.network.misbehave(provider=0, fail=500)
    assert user.download(post.root).status_code == user.upload(post).status_code == 500
    user.network.misbehave(provider=0, fail=0, nonsense="html")
    assert user.status(post).text.startswith("<html>")


def test_provider_can_leave_and_return_on_its_port(user):
    user.network.misbehave(provider=0, refuse=True)
    with pytest.raises(httpx.TransportError):
        user.client.get(user.network.providers[0])
    with pytest.raises(httpx.ConnectError), httpx.Client() as fresh:
        fresh.get(user.network.providers[0])
    assert user.client.get(user.network.providers[1]).status_code == 200
    user.network.well_behaved()
    assert user.client.get(user.network.providers[0]).status_code == 200


def test_restart_forgets_jobs_but_proves_bytes(user):
    post = user.post(random_content(5000))
    user.upload(post)
    user.network.kill()
    user.network.start()
    assert user.status(post).status_code == 404
    user.network.advance(1)
    assert len(user.provers(post)) == 1


def test_a_provider_without_space_takes_nothing(tmp_path):
    with own_network(tmp_path, provider_space=6000) as user:
        first, second = (user.post(random_content(5000)) for _ in range(2))
        assert (
            user.upload(first, version=1).status_code,
            user.upload(second, version=1).status_code,
        ) == (200, 500)


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
