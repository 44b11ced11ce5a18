"""GETs against a server that answers what moto never does.

S3's error codes, broken bodies, odd ranges.
"""

import base64
import gc
import json
import socket
import socketserver
import sys
import threading
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from zlib import crc32

import pytest
from awscrt.exceptions import AwsCrtError

from caf_pipeline.errors import (
    BucketMissing,
    ObjectReadFailed,
    ObjectUnavailable,
    SettingsError,
    SourceDenied,
    SourceError,
    SourceUnreachable,
)
from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.source.s3.clients import build_client, is_aws
from caf_pipeline.source.s3.errors import is_transient
from caf_pipeline.source.s3.get_client import GetClient, PendingGet
from caf_pipeline.source.s3.source import open_s3_source
from caf_pipeline_tests.contracts.object_source import listed
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.s3_server import (
    KEY_ID,
    SECRET,
    ScriptedAnswer,
    s3_error,
    serving,
    settings_for,
)

MOMENT = datetime(2026, 11, 1, tzinfo=UTC)
GET_OK = {
    "ETag": '"e1"',
    "Last-Modified": "Sun, 01 Nov 2026 12:30:15 GMT",
    "Accept-Ranges": "bytes",
}

SSE_C = (
    "The object was stored using a form of Server Side Encryption. The correct parameters must "
    "be provided."
)


def object_of(size_bytes: int = 5, version: str | None = None, checksum: str = "") -> S3Object:
    return S3Object(b"plain", version, "e1", size_bytes, MOMENT, "STANDARD", checksum)


def ok(body: bytes = b"bytes", **more) -> ScriptedAnswer:
    return ScriptedAnswer(200, body, dict(GET_OK), **more)


def partial(body: bytes, content_range: str) -> ScriptedAnswer:
    return ScriptedAnswer(206, body, GET_OK | {"Content-Range": content_range})


def begin(source, obj=None):
    obj = obj or object_of()
    return source.begin(obj, 0, obj.size_bytes, lambda: None)


def answers(server, *script: ScriptedAnswer):
    """Send the answers in turn, and repeat the last."""
    remaining = list(script)
    server.answer = lambda request: remaining.pop(0) if len(remaining) > 1 else remaining[0]
    return server.source()


# Requests.


def test_an_object_without_version_is_pinned_by_its_quoted_etag(scripted_s3):
    assert bytes(answers(scripted_s3, ok()).read(object_of(), 0, 5).body) == b"bytes"
    [request] = scripted_s3.requests
    assert (request.headers["if-match"], request.query.get("versionId")) == ('"e1"', None)
    assert "range" not in request.headers


def test_a_version_is_pinned_by_its_id(scripted_s3):
    answers(scripted_s3, ok()).read(object_of(version="v/1 +"), 0, 5)
    [request] = scripted_s3.requests
    assert (request.query["versionId"], request.headers.get("if-match")) == ("v/1 +", None)


def test_a_part_is_a_ranged_get(scripted_s3):
    body = answers(scripted_s3, partial(b"te", "bytes 2-3/5")).read(object_of(), 2, 4).body
    assert (bytes(body), scripted_s3.requests[0].headers["range"]) == (b"te", "bytes=2-3")


def test_an_empty_object_is_a_plain_get(scripted_s3):
    assert bytes(answers(scripted_s3, ok(b"")).read(object_of(0), 0, 0).body) == b""
    assert "range" not in scripted_s3.requests[0].headers


def test_requester_pays_header_and_anonymous_requests_without_signature(scripted_s3):
    scripted_s3.answer = lambda request: ok()
    scripted_s3.source(requester_pays=True).read(object_of(), 0, 5)
    scripted_s3.source(anonymous=True).read(object_of(), 0, 5)
    paid, anonymous = scripted_s3.requests
    assert paid.headers["x-amz-request-payer"] == "requester"
    assert KEY_ID in paid.headers["authorization"]
    assert "authorization" not in anonymous.headers


# Answers.

REASONS = [
    (s3_error(412, "PreconditionFailed"), "changed"),
    (s3_error(404, "NoSuchKey"), "deleted"),
    (s3_error(404, "NoSuchVersion"), "deleted"),
    (s3_error(405, "MethodNotAllowed"), "deleted"),
    (ScriptedAnswer(404, b""), "deleted"),
    (s3_error(403, "InvalidObjectState"), "cold_storage"),
    (s3_error(403, "AccessDenied"), "access_denied"),
    (s3_error(403, "AccessDenied", "not authorized to perform: kms:Decrypt"), "access_denied"),
    (ScriptedAnswer(403, b""), "access_denied"),
    (s3_error(400, "InvalidRequest", SSE_C), "needs_key"),
    (s3_error(400, "KMS.DisabledException"), "needs_key"),
    (s3_error(400, "KMS.NotFoundException"), "needs_key"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("answer", "reason"), REASONS)
def test_an_object_that_cannot_be_archived_has_its_reason(scripted_s3, answer, reason):
    with pytest.raises(ObjectUnavailable, match="s3://bucket-of-script/plain ") as caught:
        answers(scripted_s3, answer).read(object_of(), 0, 5)
    assert caught.value.reason == reason
    assert len(scripted_s3.requests) == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (s3_error(403, "InvalidAccessKeyId"), SourceDenied),
        (s3_error(403, "SignatureDoesNotMatch"), SourceDenied),
        (s3_error(400, "ExpiredToken"), SourceDenied),
        (s3_error(404, "NoSuchBucket"), BucketMissing),
        (s3_error(400, "InvalidRequest", "something else"), ObjectReadFailed),
        (s3_error(416, "InvalidRange"), ObjectReadFailed),
        (s3_error(501, "NotImplemented"), ObjectReadFailed),
    ],
)
def test_other_refusals_raise_instead_of_skipping(scripted_s3, answer, error):
    with pytest.raises(error) as caught:
        answers(scripted_s3, answer).read(object_of(), 0, 5)
    assert SECRET not in f"{caught.value}{caught.value.hint}"


@pytest.mark.parametrize(
    "failure",
    [
        s3_error(503, "SlowDown"),
        s3_error(500, "InternalError"),
        s3_error(400, "RequestTimeout"),
        ScriptedAnswer(429),
        ScriptedAnswer(502, b"<html>"),
        ok(b"byt", length=5),
    ],
)
def test_transient_failures_are_retried(scripted_s3, failure):
    assert bytes(answers(scripted_s3, failure, ok()).read(object_of(), 0, 5).body) == b"bytes"
    assert len(scripted_s3.requests) == 2


@pytest.mark.parametrize(
    ("failure", "fact"),
    [
        (s3_error(503, "SlowDown"), "SlowDown"),
        (s3_error(500, "InternalError"), "InternalError"),
        (ok(b"byt", length=5), "broke off its answer"),
        (ScriptedAnswer(502, b"<html>"), "502"),
        (ok(b"byt"), "3 bytes of 3, and 5 of 5"),
        (ok(b"bytes and more"), "14 bytes of 14, and 5 of 5"),
    ],
)
def test_a_failing_get_ends_after_its_attempts(scripted_s3, failure, fact):
    with pytest.raises(ObjectReadFailed, match=fact):
        answers(scripted_s3, failure).read(object_of(), 0, 5)
    assert len(scripted_s3.requests) == 2


@pytest.mark.parametrize(
    "answer",
    [
        partial(b"te", "bytes 2-3/6"),
        partial(b"tes", "bytes 2-4/5"),
        partial(b"t", "bytes 2-2/5"),
        partial(b"te", "bytes 2-3/*"),
        ScriptedAnswer(206, b"te", GET_OK),
        ok(b"bytes"),
    ],
)
def test_a_wrong_range_is_refused(scripted_s3, answer):
    with pytest.raises(ObjectReadFailed):
        answers(scripted_s3, answer).read(object_of(), 2, 4)


# awscrt reports the header on stderr, too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("bounds", "answer"), [((0, 5), ok()), ((2, 4), partial(b"te", "bytes 2-3/5"))]
)
@pytest.mark.parametrize("value", ["caf\xe9", "caf\xc3\xa9"])
def test_non_ascii_headers_equal_those_of_boto3(scripted_s3, value, bounds, answer):
    answer.headers |= {
        "x-amz-meta-Name": value,
        "Content-Type": "text/plain",
        "Last-Modified": format_datetime(MOMENT, usegmt=True),
    }
    source = answers(scripted_s3, answer)
    part = source.read(object_of(), *bounds)
    assert (part.headers.user_metadata, part.headers.content_type) == (
        {"name": value},
        "text/plain",
    )
    assert bytes(part.body) == answer.body
    assert part.headers == source.read_headers(object_of()).headers


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("headers", "algorithms"),
    [
        ({}, set()),
        ({"x-amz-checksum-sha256": "q83v"}, {"sha256"}),
        ({"x-amz-checksum-sha256": "q83v", "x-amz-checksum-type": "FULL_OBJECT"}, {"sha256"}),
        ({"x-amz-checksum-sha256": "q83v", "x-amz-checksum-type": "COMPOSITE"}, set()),
        ({"x-amz-checksum-sha256": "q83v-2"}, set()),
        ({"x-amz-checksum-sha256": "not base64"}, set()),
        (
            {"x-amz-checksum-sha256": "q83v", "x-amz-checksum-crc64nvme": "q83v"},
            {"sha256", "crc64nvme"},
        ),
    ],
)
def test_a_head_has_full_object_checksums_only(scripted_s3, headers, algorithms):
    answer = ok()
    answer.headers |= {"Last-Modified": format_datetime(MOMENT, usegmt=True), **headers}
    head = answers(scripted_s3, answer).read_headers(object_of())
    assert head.checksums == dict.fromkeys(algorithms, b"\xab\xcd\xef")
    (request,) = scripted_s3.requests
    assert (request.method, request.headers["x-amz-checksum-mode"]) == ("HEAD", "ENABLED")


# Pending reads.


def test_a_pending_read_costs_one_request_and_equals_read(scripted_s3):
    answer = head(x_amz_checksum_crc32=CRC)
    source = answers(scripted_s3, replace(answer, body=b"bytes"))
    obj = object_of(checksum="CRC32/FULL_OBJECT")
    part = begin(source, obj).part()
    assert len(scripted_s3.requests) == 1
    assert part == source.read(obj, 0, 5)
    begun, read = scripted_s3.requests
    assert (begun.method, begun.path) == (read.method, read.path)
    assert {name: begun.headers[name] for name in ("if-match", "x-amz-checksum-mode")} == {
        name: read.headers[name] for name in ("if-match", "x-amz-checksum-mode")
    }


# awscrt reports the header on stderr, too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "answer",
    [
        ScriptedAnswer(404, b"", {}),
        ScriptedAnswer(412, b"", {}),
        ScriptedAnswer(503, b"", {}),
        ScriptedAnswer(301, b"", {"Location": "http://127.0.0.1:9/"}),
        ok(b"byte"),
        ok(b"bytes and more"),
        ok(b"byte", length=5),
        ScriptedAnswer(200, b"bytes", GET_OK | {"ETag": '"another"'}),
        ScriptedAnswer(200, b"bytes", GET_OK | {"x-amz-meta-name": "caf\xe9"}),
    ],
)
def test_a_failed_pending_read_returns_no_part(scripted_s3, answer):
    begun = begin(answers(scripted_s3, answer))
    assert begun.part() is None
    assert len(scripted_s3.requests) == 1


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        (s3_error(503, "SlowDown"), True),
        (ScriptedAnswer(503), True),
        (ScriptedAnswer(429), True),
        (s3_error(500, "InternalError"), False),
        (s3_error(404, "NoSuchKey"), False),
        (ok(), False),
    ],
)
def test_a_pending_read_knows_if_it_was_refused(scripted_s3, answer, refused):
    ended = threading.Event()
    pending = answers(scripted_s3, answer).begin(object_of(), 0, 5, ended.set)
    assert ended.wait(PATIENCE_SECONDS)
    assert pending.was_refused() == refused


@pytest.mark.parametrize("connections", [40, 3])
def test_all_connections_are_opened_that_are_allowed(scripted_s3, connections):
    together = threading.Barrier(connections)
    scripted_s3.answer = lambda request: (together.wait(PATIENCE_SECONDS), ok())[-1]
    settings = settings_for(scripted_s3.endpoint, "bucket-of-script")
    source = open_s3_source("demo", settings, connections=connections)
    pending = [begin(source) for _ in range(2 * connections)]
    failed = [read.get.finished.exception() for read in pending if not read.part()]
    assert failed == []


def test_begin_returns_none_without_credentials_or_text_key(
    scripted_s3,
):
    source = answers(scripted_s3, ok())
    assert begin(source, replace(object_of(), key=b"\xff")) is None
    source._reading.gets._credentials = None
    assert begin(source) is None
    assert scripted_s3.requests == []


def test_a_pending_read_can_be_cancelled(scripted_s3):
    arrived, gate = threading.Event(), threading.Event()
    scripted_s3.answer = lambda request: (arrived.set(), gate.wait(PATIENCE_SECONDS), ok())[-1]
    try:
        begun = begin(scripted_s3.source())
        assert not begun.has_failed()
        assert arrived.wait(PATIENCE_SECONDS)
        begun.cancel()
        assert begun.part() is None
        assert begun.has_failed()
    finally:
        gate.set()


@pytest.mark.parametrize("answer", [ok(), ScriptedAnswer(404, b"", {})])
def test_a_pending_read_may_be_dropped_during_an_error(scripted_s3, answer):
    """awscrt calls Python when it frees a request, which replaced the error by another."""
    source, finished = answers(scripted_s3, answer), []

    def fail(begun):
        finished.append(begun.get.finished)
        if len(finished) % 2:
            begun.part()
        raise ZeroDivisionError

    for _ in range(40):
        with pytest.raises(ZeroDivisionError):
            fail(begin(source))
    assert not wait(finished, timeout=60).not_done


def test_awscrts_python_errors_are_transient():
    future = Future()
    future.set_exception(BrokenPipeError())
    with pytest.raises(AwsCrtError, match="AWS_IO_SOCKET_CLOSED") as broken:
        PendingGet(None, future, [], []).answer()
    assert is_transient(broken.value)


# Checksums.

CRC = base64.b64encode(b"\1\2\3\4").decode()


def head(**headers: str) -> ScriptedAnswer:
    return ScriptedAnswer(
        200,
        b"",
        GET_OK | {name.replace("_", "-"): value for name, value in headers.items()},
        length=5,
    )


@pytest.mark.parametrize(
    ("listed_as", "answer", "digest"),
    [
        (
            "CRC32/FULL_OBJECT",
            head(x_amz_checksum_crc32=CRC, x_amz_checksum_type="FULL_OBJECT"),
            b"\1\2\3\4",
        ),
        ("CRC32", head(x_amz_checksum_crc32=CRC), b"\1\2\3\4"),
        ("CRC32", head(x_amz_checksum_crc32=f"{CRC}-3"), None),
        ("CRC32", head(x_amz_checksum_crc32=CRC, x_amz_checksum_type="COMPOSITE"), None),
        ("CRC32/FULL_OBJECT", head(), None),
        ("CRC32/FULL_OBJECT", head(x_amz_checksum_crc32="not base64!"), None),
    ],
)
def test_a_checksum_must_cover_the_full_object(scripted_s3, listed_as, answer, digest):
    from_head = answers(scripted_s3, answer).full_object_checksum(object_of(checksum=listed_as))
    assert (from_head.digest if from_head else None) == digest
    [request] = scripted_s3.requests
    assert (
        request.method,
        request.headers["x-amz-checksum-mode"],
        request.headers["if-match"],
    ) == ("HEAD", "ENABLED", '"e1"')
    from_get = (
        answers(scripted_s3, replace(answer, body=b"bytes"))
        .read(object_of(checksum=listed_as), 0, 5)
        .checksum
    )
    assert from_get == from_head
    assert [request.method for request in scripted_s3.requests] == ["HEAD", "GET"]


def test_a_ranged_get_requests_no_checksum(scripted_s3):
    """S3 returns no checksum with a range; other servers return that of the whole object."""
    answer = partial(b"te", "bytes 2-3/5")
    answer.headers |= {"x-amz-checksum-crc32": CRC, "x-amz-checksum-type": "FULL_OBJECT"}
    part = answers(scripted_s3, answer).read(object_of(checksum="CRC32/FULL_OBJECT"), 2, 4)
    assert part.checksum is None
    assert "x-amz-checksum-mode" not in scripted_s3.requests[0].headers


def test_get_requests_no_checksum_that_the_listing_lacks(scripted_s3):
    assert answers(scripted_s3, ok()).read(object_of(), 0, 5).checksum is None
    assert "x-amz-checksum-mode" not in scripted_s3.requests[0].headers


@pytest.mark.parametrize(
    ("headers", "digest"),
    [
        ({"x-amz-checksum-crc32": CRC}, b"\1\2\3\4"),
        ({"x-amz-checksum-crc32": f"{CRC}-3"}, None),
        ({}, None),
    ],
)
def test_get_requests_any_checksum_if_the_source_has_reports(scripted_s3, headers, digest):
    answer = ok()
    answer.headers |= headers
    scripted_s3.answer = lambda request: answer
    source = scripted_s3.source(inventory="s3://dest/p/bucket-of-script/daily/")
    assert source.full_object_checksum(object_of()) is None
    checksum = begin(source).part().checksum
    assert (checksum.digest if checksum else None) == digest
    assert [
        (request.method, request.headers["x-amz-checksum-mode"]) for request in scripted_s3.requests
    ] == [("GET", "ENABLED")]
    source.read(object_of(checksum="CRC32/COMPOSITE"), 0, 5)
    assert "x-amz-checksum-mode" not in scripted_s3.requests[1].headers


# awscrt reports the header on stderr, too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_object_with_non_ascii_headers_has_its_checksum(scripted_s3):
    crc = crc32(b"bytes").to_bytes(4, "big")
    answer = ok()
    answer.headers |= {
        "x-amz-meta-name": "caf\xe9",
        "x-amz-checksum-crc32": base64.b64encode(crc).decode(),
    }
    part = answers(scripted_s3, answer).read(object_of(checksum="CRC32"), 0, 5)
    assert (part.headers.user_metadata, part.checksum.digest) == ({"name": "caf\xe9"}, crc)
    assert [request.headers["x-amz-checksum-mode"] for request in scripted_s3.requests] == [
        "ENABLED",
        "ENABLED",
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("checksum", [CRC, "not base64"])
def test_wrong_bytes_beside_non_ascii_headers_are_read_again(scripted_s3, checksum):
    answer = ok()
    answer.headers |= {"x-amz-meta-name": "caf\xe9", "x-amz-checksum-crc32": checksum}
    source = answers(scripted_s3, answer)
    with pytest.raises(ObjectReadFailed, match="checksum"):
        source.read(object_of(checksum="CRC32"), 0, 5)
    assert len(scripted_s3.requests) == 2 * 2  # by awscrt and by boto3, in each attempt


@pytest.mark.parametrize("checksum", ["", "CRC32/COMPOSITE", "MD5/FULL_OBJECT", "SHA256/SOMETHING"])
def test_no_head_without_a_listed_full_object_checksum(scripted_s3, checksum):
    assert answers(scripted_s3, head()).full_object_checksum(object_of(checksum=checksum)) is None
    assert scripted_s3.requests == []


@pytest.mark.parametrize(
    ("status", "get", "outcome"),
    [
        (400, s3_error(400, "InvalidRequest", SSE_C), "needs_key"),
        (403, s3_error(403, "AccessDenied"), "access_denied"),
        (412, s3_error(412, "PreconditionFailed"), "changed"),
        (404, s3_error(404, "NoSuchKey"), "deleted"),
        (403, partial(b"b", "bytes 0-0/5"), None),
    ],
)
def test_a_head_that_fails_is_explained_by_a_get(scripted_s3, status, get, outcome):
    scripted_s3.answer = lambda request: ScriptedAnswer(status) if request.method == "HEAD" else get
    source, obj = scripted_s3.source(), object_of(checksum="CRC32/FULL_OBJECT")
    if outcome is None:
        assert source.full_object_checksum(obj) is None
        return
    with pytest.raises(ObjectUnavailable) as caught:
        source.full_object_checksum(obj)
    assert caught.value.reason == outcome


# Servers and credentials.

CLOSED_PORT = "http://127.0.0.1:1"


def test_a_closed_port_is_unreachable():
    source = open_s3_source("demo", settings_for(CLOSED_PORT, "bucket"), attempts=2)
    with pytest.raises(SourceUnreachable, match=CLOSED_PORT) as caught:
        listed(source)
    assert "endpoint_url" in caught.value.hint
    with pytest.raises(ObjectReadFailed, match="connection refused"):
        source.read(object_of(), 0, 5)


def test_missing_credentials_name_the_variables_to_set(scripted_s3):
    source = open_s3_source(
        "demo",
        settings_for(scripted_s3.endpoint, "bucket", access_key_id=None, secret_access_key=None),
        attempts=2,
    )
    for ask in (lambda: listed(source), lambda: source.read(object_of(), 0, 5)):
        with pytest.raises(SourceDenied) as caught:
            ask()
        assert "CAF_SOURCES__DEMO__ACCESS_KEY_ID" in caught.value.hint
    assert scripted_s3.requests == []


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """Return the file with the temporary credentials of a profile, which a process prints."""
    file = tmp_path / "credentials.json"
    print_file = f"import pathlib; print(pathlib.Path({str(file)!r}).read_text())"
    (tmp_path / "print.py").write_text(print_file)
    config = (
        f"[profile work]\nregion = eu-test-1\ncredential_process = {sys.executable} "
        f"{tmp_path / 'print.py'}\n"
    )
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return file


def temporary(key_id: str, lasts: timedelta) -> str:
    expiration = (datetime.now(UTC) + lasts).isoformat()
    keys = {
        "AccessKeyId": key_id,
        "SecretAccessKey": "s",
        "SessionToken": f"token of {key_id}",
        "Expiration": expiration,
    }
    return json.dumps({"Version": 1, **keys})


def test_temporary_credentials_are_renewed_while_the_source_is_open(scripted_s3, profile):
    profile.write_text(temporary("FIRST", timedelta(minutes=1)))
    scripted_s3.answer = lambda request: ok()
    settings = settings_for(
        scripted_s3.endpoint, "bucket", profile="work", access_key_id=None, secret_access_key=None
    )
    source = open_s3_source("demo", settings)
    source.read(object_of(), 0, 5)
    profile.write_text(temporary("SECOND", timedelta(hours=1)))
    source.read(object_of(), 0, 5)
    source.read(object_of(), 0, 5)
    first, second, third = scripted_s3.requests
    assert "Credential=FIRST/" in first.headers["authorization"]
    assert "/eu-test-1/s3/" in first.headers["authorization"]
    assert first.headers["x-amz-security-token"] == "token of FIRST"
    assert [request.headers["x-amz-security-token"] for request in (second, third)] == [
        "token of SECOND"
    ] * 2


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"AWS_PROFILE": "nowhere"}, "profile 'nowhere'"),
        ({"AWS_DEFAULT_REGION": "not a region!"}, "'not a region!'"),
        ({"AWS_ENDPOINT_URL_S3": "not a url"}, "not a url"),
    ],
)
def test_an_invalid_aws_variable_is_named(changes, fact, monkeypatch):
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=fact) as caught:
        open_s3_source(
            "demo", settings_for("", "bucket", access_key_id=None, secret_access_key=None)
        )
    assert next(iter(changes)) in caught.value.hint


def test_a_missing_secret_key_is_named(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    with pytest.raises(SettingsError, match="AWS_SECRET_ACCESS_KEY is missing"):
        open_s3_source(
            "demo", settings_for(CLOSED_PORT, "bucket", access_key_id=None, secret_access_key=None)
        )


def test_a_missing_profile_is_named():
    with pytest.raises(SettingsError, match="profile 'nowhere'"):
        open_s3_source("demo", settings_for(CLOSED_PORT, "bucket", profile="nowhere"))


def test_an_arn_of_no_access_point_is_named(scripted_s3):
    with pytest.raises(SettingsError, match=r"sources\.demo\.bucket: 'arn:aws:sns:x'"):
        listed(open_s3_source("demo", settings_for(scripted_s3.endpoint, "arn:aws:sns:x")))


@pytest.mark.parametrize(
    ("options", "endpoint", "path"),
    [
        ({"bucket": "plain"}, "https://plain.s3.eu-west-1.amazonaws.com", ""),
        ({"bucket": "with.dots"}, "https://s3.eu-west-1.amazonaws.com", "/with.dots"),
        (
            {"bucket": "plain", "bucket_region": "us-west-2"},
            "https://plain.s3.us-west-2.amazonaws.com",
            "",
        ),
        ({"bucket": "plain", "region": "us-east-1"}, "https://plain.s3.amazonaws.com", ""),
        (
            {"bucket": "plain", "region": "us-east-1", "bucket_region": "us-west-2"},
            "https://plain.s3.us-west-2.amazonaws.com",
            "",
        ),
        ({"bucket": "plain", "path_style": True}, "https://s3.eu-west-1.amazonaws.com", "/plain"),
        (
            {"bucket": "plain", "endpoint": "http://127.0.0.1:9000"},
            "http://127.0.0.1:9000",
            "/plain",
        ),
        (
            {"bucket": "plain", "endpoint": "https://s3.example.org", "path_style": False},
            "https://plain.s3.example.org",
            "",
        ),
    ],
)
def test_gets_go_to_the_endpoint_of_boto3(options, endpoint, path):
    settings = {"region": "eu-west-1", "endpoint": "", "bucket_region": None} | options
    bucket, bucket_region = settings.pop("bucket"), settings.pop("bucket_region")
    client = build_client(settings_for(settings.pop("endpoint"), bucket, **settings))
    gets = GetClient(client, bucket, region=bucket_region)
    assert (gets.endpoint, gets.path) == (endpoint, path)
    assert gets.region == (bucket_region or settings["region"])
    assert is_aws(client) == ("endpoint" not in options)


def test_an_ip_address_is_addressed_by_path(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    gets = GetClient(build_client(settings_for("", "plain")), "plain")
    assert (gets.endpoint, gets.path) == ("http://127.0.0.1:9000", "/plain")


@pytest.fixture
def tls_s3(scripted_s3, tls, certificate):
    """Yield a server's URL and the file with its self-signed certificate."""
    with serving(scripted_s3, tls) as port:
        yield f"https://localhost:{port}", certificate


def test_gets_trust_the_same_certificates_as_boto3(tls_s3, scripted_s3, monkeypatch):
    endpoint, file = tls_s3
    scripted_s3.answer = lambda request: ok()
    monkeypatch.setenv("AWS_CA_BUNDLE", str(file))
    source = open_s3_source("demo", settings_for(endpoint, "bucket"), attempts=1)
    assert bytes(source.read(object_of(), 0, 5).body) == b"bytes"


@contextmanager
def tunnel():
    """Run a proxy with CONNECT only; yield its address and the requested hosts."""
    hosts: list[str] = []

    def pump(reader, writer):
        with suppress(OSError):
            while piece := reader.recv(1 << 16):
                writer.sendall(piece)
            writer.shutdown(socket.SHUT_WR)

    class Tunnel(socketserver.StreamRequestHandler):
        def handle(self):
            hosts.append(self.rfile.readline().split()[1].decode())
            while self.rfile.readline().strip():
                pass
            with socket.create_connection(
                ("127.0.0.1", int(hosts[-1].rpartition(":")[2]))
            ) as upstream:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=pump, args=(upstream, self.connection))
                back.start()
                pump(self.connection, upstream)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tunnel) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", hosts
        finally:
            server.shutdown()
            thread.join()


def test_https_uses_the_proxy_of_the_environment(tls_s3, scripted_s3, monkeypatch):
    endpoint, file = tls_s3
    scripted_s3.answer = lambda request: ok()
    monkeypatch.setenv("AWS_CA_BUNDLE", str(file))
    with tunnel() as (proxy, hosts):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        source = open_s3_source("demo", settings_for(endpoint, "bucket"), attempts=1)
        assert bytes(source.read(object_of(), 0, 5).body) == b"bytes"
        del source
        gc.collect()
    assert hosts == [endpoint.removeprefix("https://")]


def test_http_uses_the_proxy_of_the_environment(scripted_s3, monkeypatch):
    scripted_s3.answer = lambda request: ok()
    monkeypatch.setenv("HTTP_PROXY", scripted_s3.endpoint)
    source = open_s3_source("demo", settings_for("http://s3.invalid", "bucket"), attempts=1)
    assert bytes(source.read(object_of(), 0, 5).body) == b"bytes"
    [request] = scripted_s3.requests
    assert (request.headers["host"], request.path) == ("s3.invalid", "/bucket/plain")


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_no_proxy_hosts_are_reached_directly(scripted_s3, monkeypatch, name):
    scripted_s3.answer = lambda request: ok()
    monkeypatch.setenv("HTTP_PROXY", CLOSED_PORT)
    monkeypatch.setenv(name, "example.org,127.0.0.1")
    assert bytes(scripted_s3.source().read(object_of(), 0, 5).body) == b"bytes"


@pytest.mark.thorough
def test_an_unknown_certificate_is_not_trusted(tls_s3):
    source = open_s3_source("demo", settings_for(tls_s3[0], "bucket"), attempts=2)
    with pytest.raises(SourceError, match="certificate") as caught:
        listed(source)
    assert caught.value.permanent
    assert "AWS_CA_BUNDLE" in caught.value.hint
    with pytest.raises(ObjectReadFailed, match="certificate"):
        source.read(object_of(), 0, 5)


def test_http_to_an_https_port_names_the_setting(tls_s3):
    endpoint = tls_s3[0].replace("https:", "http:")
    with pytest.raises(SourceError, match="HTTPS") as caught:
        listed(open_s3_source("demo", settings_for(endpoint, "bucket"), attempts=2))
    assert "https://" in caught.value.hint
    assert "sources.demo.endpoint_url" in caught.value.hint


def test_a_file_of_certificates_that_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere.pem")
    with pytest.raises(SettingsError, match=r"AWS_CA_BUNDLE names /nowhere\.pem"):
        open_s3_source("demo", settings_for("https://127.0.0.1:1", "bucket"))
