"""The client of one provider, against a scripted one."""

import json
import os
import random
import re

import pytest

from caf_pipeline.errors import (
    IntegrityError,
    LeaseLost,
    StoredChunkMissing,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.records import PostRecord
from caf_pipeline.store.jackal import provider
from caf_pipeline.store.jackal.names import job_id
from caf_pipeline.store.jackal.provider import Job, ProviderClient, Sending
from caf_pipeline.store.jackal.provider_http import MAX_ANSWER_BYTES, ask, parse_address
from caf_pipeline_tests.support.scripted_provider import answer, scripted

ROOT = bytes(range(32))
DATA = random.Random(4).randbytes(3_000_000)
SIZE = len(DATA)
POSTING = PostRecord(ROOT, "jkl1owner", 77, len(DATA))
NOT_YET = answer(404, '{"error":"could not job from id"}')


class UploadControl:
    def __init__(self, fail_after=None):
        self.pieces, self.fail_after, self.checks = [], fail_after, 0

    def check(self):
        self.checks += 1
        if self.fail_after is not None and self.checks > self.fail_after:
            raise LeaseLost("gone")

    def piece_bytes(self):
        return 1 << 20

    def sent(self, size_bytes):
        self.pieces.append(size_bytes)


@pytest.fixture
def staged(tmp_path):
    path = tmp_path / "staged.caf"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def client_of():
    clients = []

    def open_client(script):
        clients.append(ProviderClient(script.url, may_be_private=True))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


def named(value):
    """Return an answer's status as its test id."""
    return value.split()[1].decode() if isinstance(value, bytes) else None


def sending(staged, control=None, **changes):
    return Sending(
        POSTING,
        staged,
        control or UploadControl(),
        **({"proof_type": 3, "answer_seconds": 30.0} | changes),
    )


def status(progress, text):
    return answer(
        200,
        json.dumps(
            {"merkle": "", "owner": "", "start": 1, "cid": "", "progress": progress, "status": text}
        ),
    )


# --- addresses ---


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("https://Provider.example/", "https://provider.example"),
        ("http://127.0.0.1:3333", "http://127.0.0.1:3333"),
        ("http://[::1]:3333/jackal/", "http://[::1]:3333/jackal"),
        ("https://p.example:443/?a=b#c", "https://p.example"),
    ],
)
def test_address_is_parsed_without_extra_parts(url, plain):
    assert str(parse_address(url)) == plain


NO_ADDRESSES = [
    "",
    "p.example",
    "ftp://p.example",
    "file:///etc/passwd",
    "http://",
    "http://me:secret@p.example",
    "http://p.example:x",
    "http://p.example\r\nX: y",
    "http://p .example",
    "http://p.exämple",
    "http://[::1",
]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_unusual_provider_address_is_refused(url):
    with pytest.raises(StoreError, match="address"):
        parse_address(url)


# --- uploads ---


def test_upload_form_has_known_length_and_file_last(client_of, staged):
    bodies = []

    def take(request, sock):
        bodies.append(request.body())
        sock.sendall(answer(202, '{"job_id":"x"}'))

    control = UploadControl()
    with scripted(take) as script:
        assert not client_of(script).upload(sending(staged, control)).done
    (request,) = script.requests
    boundary = re.fullmatch(
        r"multipart/form-data; boundary=(\w+)", request.headers["content-type"]
    )[1]
    parts = bodies[0].split(f"--{boundary}".encode())
    values = [part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n") for part in parts[1:-1]]
    names = [re.search(rb'name="(\w+)"', part)[1] for part in parts[1:-1]]
    assert (request.method, request.path) == ("POST", "/v2/upload")
    assert names == [b"sender", b"merkle", b"start", b"file"]
    assert values == [b"jkl1owner", ROOT.hex().encode(), b"77", DATA]
    assert parts[-1] == b"--\r\n"
    assert (sum(control.pieces), max(control.pieces)) == (len(DATA), 1 << 20)


def test_provider_without_v2_upload_gets_v1_with_proof_type(client_of, staged):
    bodies = []

    def take(request, sock):
        bodies.append(request.body())
        sock.sendall(answer(200, '{"merkle":"","owner":"","start":77,"cid":""}'))

    with scripted(
        lambda request, sock: sock.sendall(answer(404, "404 page not found")), take
    ) as script:
        assert client_of(script).upload(sending(staged)).done
    assert [request.path for request in script.requests] == ["/v2/upload", "/upload"]
    assert b'name="type"\r\n\r\n3\r\n' in bodies[0]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("cannot accept file that I cannot claim", "finds_no_slot"),
        ("failed to write file to disk: merkle does not match a != b", "refuses_bytes"),
        ("cannot accept file that doesn't match the chain data A != a", "refuses_bytes"),
        ("failed to find file on chain with merkle: 00", "sees_no_post"),
    ],
)
def test_error_texts_of_v1_uploads_are_understood(client_of, staged, text, kind):
    with scripted(answer(405), answer(500, json.dumps({"error": text}))) as script:
        job = client_of(script).upload(sending(staged))
    assert getattr(job, kind)
    assert not job.done


@pytest.mark.parametrize(
    "reply",
    [answer(500, '{"error":"disk"}'), answer(503), answer(302, Location="http://127.0.0.1:1/")],
    ids=named,
)
def test_unexpected_answer_to_an_upload_raises(client_of, staged, reply):
    with scripted(reply) as script, pytest.raises(StoreUnreachable):
        client_of(script).upload(sending(staged))
    assert len(script.requests) == 1


def test_early_answer_ends_the_upload(client_of, tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"")
    os.truncate(path, 1 << 30)
    control = UploadControl()
    large = Sending(
        PostRecord(ROOT, "o", 1, 1 << 30), path, control, proof_type=3, answer_seconds=30
    )

    def refuse(request, sock):
        sock.sendall(answer(413, '{"error":"too large"}'))

    with scripted(refuse) as script, pytest.raises(StoreUnreachable, match="413 too large"):
        client_of(script).upload(large)
    assert sum(control.pieces) < 1 << 30


def test_an_answer_that_is_lost_is_learned_from_the_status(client_of, staged):
    def take(request, sock):
        if request.path == "/v2/upload":
            request.body()
            # Silent until the client has polled the job and leaves.
            sock.settimeout(30)
            sock.recv(1)
        else:
            sock.sendall(status(100, "done!"))

    with scripted(take) as script:
        assert client_of(script).upload(sending(staged)).done
    assert script.requests[-1].path == f"/v2/status/{job_id(ROOT, 'jkl1owner', 77)}"


def test_connection_broken_in_the_body_raises(client_of, staged):
    with scripted(lambda request, sock: sock.recv(1000)) as script, pytest.raises(StoreUnreachable):
        client_of(script).upload(sending(staged))


@pytest.mark.thorough
def test_a_check_ends_an_upload_that_hangs(client_of, staged):
    def hang(request, sock):
        request.body()
        sock.recv(1)

    with scripted(hang) as script, pytest.raises(LeaseLost):
        client_of(script).upload(sending(staged, UploadControl(fail_after=12)))


def test_a_file_that_shrank_ends_the_upload(client_of, staged):
    os.truncate(staged, 1000)
    with (
        scripted(lambda request, sock: request.body()) as script,
        pytest.raises(StoreError, match="before its size"),
    ):
        client_of(script).upload(sending(staged))


# --- jobs ---


def test_unknown_job_is_none(client_of):
    with scripted(NOT_YET) as script:
        assert client_of(script).job(POSTING) is None


@pytest.mark.parametrize(
    ("job", "done"),
    [
        (Job(100, "done!"), True),
        (Job(99, "hashing"), False),
        (Job(100, "Error: Could not write"), False),
        (Job(10, ""), False),
    ],
)
def test_only_all_of_the_progress_without_an_error_is_done(job, done):
    assert job.done is done


def test_error_is_recognized_by_its_prefix(client_of):
    with scripted(status(30, "Error: Can't claim")) as script:
        job = client_of(script).job(POSTING)
    assert (job.finds_no_slot, job.done) == (True, False)


# --- answers in general ---


def test_an_answer_without_an_end_is_refused():
    with (
        scripted(answer(200, b"x" * (MAX_ANSWER_BYTES + 1))) as script,
        pytest.raises(StoreUnreachable, match="more than"),
    ):
        ask(parse_address(script.url, may_be_private=True), "/")


def test_closed_port_raises_store_unreachable():
    with pytest.raises(StoreUnreachable, match="cannot be reached"):
        ask(parse_address("http://127.0.0.1:1", may_be_private=True), "/")


@pytest.mark.parametrize(
    ("reply", "room"),
    [
        (answer(200, '{"total_space":9,"used_space":2,"free_space":7}'), 7),
        (answer(404, "404 page not found"), None),
    ],
)
def test_a_provider_may_tell_its_room(client_of, reply, room):
    with scripted(reply) as script:
        assert client_of(script).free_bytes() == room


# --- downloads ---


@pytest.fixture(params=["by httpcore", "past it"])
def each_way(request, monkeypatch):
    """httpcore reads small answers, and large ones are read past it: here both are small."""
    if request.param == "past it":
        monkeypatch.setattr(provider, "DIRECT_FROM_BYTES", 1)


def ranged(request, sock, *, cut=None, data=DATA, **headers):
    first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["range"]).groups())
    piece = data[first : last + 1]
    content_range = f"bytes {first}-{first + len(piece) - 1}/{len(data)}"
    sock.sendall(answer(206, piece[:cut], len(piece), Content_Range=content_range, **headers))


def read(client, start=0, end=SIZE, **options):
    return b"".join(client.download(POSTING, start, end, **options))


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    ("start", "end"),
    [(0, len(DATA)), (0, 1), (1_234_567, 2_999_999), (len(DATA) - 1, len(DATA)), (5, 5)],
)
def test_a_range_is_read(client_of, start, end):
    with scripted(ranged) as script:
        pieces = list(client_of(script).download(POSTING, start, end))
    assert b"".join(pieces) == DATA[start:end]
    assert max(map(len, pieces), default=0) <= 1 << 20


@pytest.mark.usefixtures("each_way")
def test_silently_cut_download_resumes_where_it_ended(client_of):
    def cut(request, sock):
        ranged(request, sock, cut=1_000_000)

    with scripted(cut) as script:
        assert read(client_of(script), 10) == DATA[10:]
    assert [request.headers["range"] for request in script.requests] == [
        f"bytes={start}-{len(DATA) - 1}" for start in (10, 1_000_010, 2_000_010)
    ]


@pytest.mark.usefixtures("each_way")
def test_a_download_that_comes_no_further_is_given_up(client_of):
    with (
        scripted(answer(206, b"", 10, Content_Range=f"bytes 0-9/{len(DATA)}")) as script,
        pytest.raises(StoreUnreachable),
    ):
        read(client_of(script), 0, 10)
    assert len(script.requests) == 3


@pytest.mark.usefixtures("each_way")
def test_a_whole_file_instead_of_a_range_is_skipped_over(client_of):
    with scripted(answer(200, DATA)) as script:
        assert read(client_of(script), 1_500_000, 1_500_010) == DATA[1_500_000:1_500_010]


@pytest.mark.usefixtures("each_way")
def test_more_than_was_asked_for_is_not_taken(client_of):
    with scripted(
        answer(206, DATA, Content_Range=f"bytes 0-{len(DATA) - 1}/{len(DATA)}")
    ) as script:
        assert read(client_of(script), 0, 10) == DATA[:10]


@pytest.mark.usefixtures("each_way")
def test_bytes_after_an_answer_are_ignored(client_of):
    def more(request, sock):
        ranged(request, sock)
        sock.sendall(b"more" * 100_000)

    with scripted(more) as script:
        client = client_of(script)
        for start in (1_000_000, 2_000_000):
            assert read(client, start, start + 700_000) == DATA[start : start + 700_000]


@pytest.mark.usefixtures("each_way")
def test_an_answer_in_chunks_is_read(client_of):
    def chunked(request, sock):
        sock.sendall(
            "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes "
            f"0-{SIZE - 1}/{SIZE}\r\nContent-Length: {SIZE}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        for start in range(0, SIZE, 400_000):
            piece = DATA[start : start + 400_000]
            sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        sock.sendall(b"0\r\n\r\n")

    with scripted(chunked) as script:
        assert read(client_of(script)) == DATA


@pytest.mark.parametrize(
    "reply",
    [
        answer(206, DATA[:10], Content_Range="bytes 0-9/999"),
        answer(200, b"x" * 999),
        answer(416, "invalid range"),
    ],
    ids=named,
)
def test_file_of_another_size_does_not_count(client_of, reply):
    with scripted(reply) as script, pytest.raises(IntegrityError):
        read(client_of(script), 0, 10)


@pytest.mark.parametrize(
    "reply",
    [answer(500, '{"error":"cannot get cid mapping from disk: Key not found"}'), answer(404)],
    ids=named,
)
def test_an_unknown_root_is_missing(client_of, reply):
    with scripted(reply) as script, pytest.raises(StoredChunkMissing):
        read(client_of(script))


@pytest.mark.parametrize(
    "reply",
    [
        *(answer(500, "panic"), answer(503), answer(301, Location="http://127.0.0.1:1/")),
        *(
            answer(404, "404 page not found\n"),
            answer(404, "<html>nginx</html>", Content_Type="text/html"),
        ),
        answer(200, "<html>back soon</html>", Content_Type="text/html; charset=utf-8"),
        answer(200, '{"error":"busy"}', Content_Type="application/json"),
        answer(200, b"\x1f\x8b, compressed by a proxy", Content_Encoding="gzip"),
        answer(
            206,
            DATA[::-1],
            Content_Range=f"bytes 0-{len(DATA) - 1}/{len(DATA)}",
            Content_Encoding="gzip",
        ),
    ],
    ids=named,
)
def test_unexpected_answer_to_a_download_raises(client_of, reply):
    with scripted(reply) as script, pytest.raises(StoreUnreachable):
        read(client_of(script))


def test_a_download_is_asked_for_as_it_is_stored(client_of):
    with scripted(ranged) as script:
        read(client_of(script), 0, 10)
    assert script.requests[0].headers["accept-encoding"] == "identity"


def test_ranges_in_a_row_share_a_connection(client_of):
    with scripted(ranged, kept=True) as script:
        client = client_of(script)
        for start in range(5):
            assert read(client, start, start + 10) == DATA[start : start + 10]
        client.close()
    assert script.connections == 1


def test_a_kept_connection_that_was_closed_meanwhile_is_replaced(client_of):
    with scripted(ranged) as script:
        client = client_of(script)
        for _ in range(3):
            assert read(client, 0, 10) == DATA[:10]
    assert script.connections == 3


@pytest.mark.usefixtures("each_way")
def test_a_check_ends_a_download_that_hangs(client_of):
    def hang(request, sock):
        sock.recv(1)

    looks = []

    def check():
        looks.append(1)
        if len(looks) > 3:
            raise LeaseLost("gone")

    with scripted(hang) as script, pytest.raises(LeaseLost):
        read(client_of(script), check=check)


# --- TLS ---


@pytest.fixture
def _trusted(certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))


@pytest.mark.usefixtures("_trusted", "each_way")
def test_over_tls_files_go_and_come_in_the_same_way(client_of, staged, tls):
    bodies = []

    def take(request, sock):
        bodies.append(request.body())
        sock.sendall(answer(202, '{"job_id":"x"}'))

    with scripted(take, ranged, tls=tls) as script:
        client = client_of(script)
        client.upload(sending(staged))
        assert read(client, 10, 2_000_000) == DATA[10:2_000_000]
    assert DATA in bodies[0]


def test_provider_with_an_untrusted_certificate_is_refused(client_of, tls):
    with scripted(NOT_YET, tls=tls) as script, pytest.raises(StoreUnreachable, match="certificate"):
        client_of(script).job(POSTING)
