"""Listings of S3 and compatible servers, valid and invalid."""

import re
from urllib.parse import quote, quote_plus
from xml.sax.saxutils import escape

import pytest
from botocore.parsers import create_parser
from hypothesis import given
from hypothesis import strategies as st

from caf_pipeline.errors import (
    BucketMissing,
    ListingRefused,
    SourceDenied,
    SourceError,
    SourceUnreachable,
)
from caf_pipeline.inventory.key_split import LAST, just_before, text_of
from caf_pipeline.settings import SourceSettings
from caf_pipeline.source.s3.clients import build_client
from caf_pipeline.source.s3.listing import CycleDetector, Undecodable, decode_key
from caf_pipeline_tests.contracts.object_source import listed
from caf_pipeline_tests.support.listing_entries import TIME, entry, version
from caf_pipeline_tests.support.listing_server import ListedKeys
from caf_pipeline_tests.support.s3_server import KEY_ID, SECRET, ScriptedAnswer, s3_error
from caf_pipeline_tests.support.tiers import sampled


def page(
    *keys: str,
    more: str = "",
    encoding: str = "url",
    count: int | None = None,
    **changes: str | None,
) -> ScriptedAnswer:
    contents = "".join(f"<Contents>{entry(key, **changes)}</Contents>" for key in keys)
    contents += "" if count is None else f"<KeyCount>{count}</KeyCount>"
    return listing(
        contents,
        more=f"<NextContinuationToken>{more}</NextContinuationToken>" if more else "",
        encoding=encoding,
    )


def listing(
    contents: str, more: str = "", encoding: str = "url", truncated: bool | None = None
) -> ScriptedAnswer:
    head = f"<EncodingType>{encoding}</EncodingType>" if encoding else ""
    is_truncated = "true" if (bool(more) if truncated is None else truncated) else "false"
    body = (
        f"<ListResult>{head}<IsTruncated>{is_truncated}</IsTruncated>{more}{contents}</ListResult>"
    )
    return ScriptedAnswer(200, body.encode(), {"Content-Type": "application/xml"})


UNVERSIONED = ScriptedAnswer(200, b"<VersioningConfiguration/>")
VERSIONED = ScriptedAnswer(
    200, b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
)


def script(server, *answers: ScriptedAnswer, versioning: ScriptedAnswer = UNVERSIONED):
    """Send the answers in turn, repeat the last, and answer GetBucketVersioning."""
    remaining = list(answers)

    def answer(request):
        if "versioning" in request.query:
            return versioning
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    server.answer = answer
    return server.source()


# Keys.


@given(st.binary(min_size=1))
def test_decoding_accepts_both_forms_of_a_space(key):
    assert decode_key(quote(key, safe="/"), "url") == decode_key(quote_plus(key), "url") == key


@pytest.mark.parametrize(
    ("text", "encoding", "key"),
    [
        ("a+b%2Bc", "url", b"a b+c"),
        ("%ff%FE", "url", b"\xff\xfe"),
        ("a/b~c*d", "url", b"a/b~c*d"),
        ("é", "url", "é".encode()),
        ("a+b%2Bc", None, b"a+b%2Bc"),
        ("%", None, b"%"),
    ],
)
def test_keys_are_decoded_by_the_answers_encoding_type(text, encoding, key):
    assert decode_key(text, encoding) == key


@pytest.mark.parametrize(
    "text", ["%", "a%", "a%4", "%zz", "%4g", "%%41", "%u0041", "a%\u0664\u0661"]
)
def test_a_percent_sign_without_two_hexadecimal_digits_is_refused(text):
    with pytest.raises(Undecodable):
        decode_key(text, "url")


# Starts.

ODD_CHARACTERS = [*map(chr, range(0x20)), "\x7f", "\x85", "\ufffe", "\uffff"]
STARTS = st.lists(
    st.sampled_from(
        [*map(str.encode, [*ODD_CHARACTERS, *"a \ue000\ufffd\U00010000", LAST]), b"\xff"]
    ),
    min_size=1,
    max_size=4,
).map(b"".join)


@given(STARTS, st.sampled_from([0, 1016, 1020]))
def test_a_start_is_short_and_up_to_its_key(key, filler):
    key = (b"x" * filler + key)[:1024]
    start, before = text_of(key).encode(), just_before(key)
    assert start <= key
    assert before < key
    assert text_of(before).encode() == before
    assert max(len(start), len(before)) <= 1024
    assert b"kz" < just_before(b"k{") < b"k{"


@pytest.mark.parametrize(
    ("key", "start"),
    [
        (b"\0nul", ""),
        (b"a/\x1fb", "a/"),
        ("\ufffe".encode(), "\ufffd" + LAST),
        ("a\uffffb\0".encode(), "a\ufffd" + LAST),
        (b"x" * 1021 + "\ufffe".encode(), "x" * 1021 + "\ufffd"),
    ],
)
def test_a_start_ends_before_what_xml_cannot_contain(key, start):
    assert text_of(key) == start


@pytest.mark.parametrize("echo", [escape, quote])
@pytest.mark.parametrize("versioned", sampled([False, True], every=2))
def test_a_listing_starts_at_any_character(scripted_s3, echo, versioned):
    keys = sorted(
        f"{'bc'[:at]}{char}{'bc'[at:]}".encode() for char in ODD_CHARACTERS for at in range(3)
    )
    source = ListedKeys(keys, versioned=versioned, echo=echo).serve(scripted_s3, page_keys=1000)
    for number, key in enumerate(keys):
        behind = listed(source, after=key, by_version=versioned)
        assert [obj.key for obj in behind] == keys[number + 1 :]
        assert key in [
            obj.key for obj in listed(source, after=just_before(key), by_version=versioned)
        ]


# Entries.

TEXT = st.text(st.characters(exclude_categories=["C"]), max_size=8)
TIMES = st.sampled_from(
    [
        TIME,
        "2026-11-01T12:30:15Z",
        "2026-11-01T13:30:15+01:00",
        "Sun, 01 Nov 2026 12:30:15 GMT",
        "1793536215",
    ]
)
FIELDS = {
    **dict.fromkeys(
        ["Key", "ETag", "VersionId", "StorageClass", "ChecksumType", "ChecksumAlgorithm", "Owner"],
        TEXT,
    ),
    "Size": st.integers().map(str),
    "LastModified": TIMES,
    "IsLatest": st.sampled_from(["true", "false", ""]),
}
READ = FIELDS.keys() - {"Owner"}
ENTRIES = st.lists(st.fixed_dictionaries({}, optional=FIELDS), max_size=4)


def elements(kind: str, entries: list[dict[str, str]]) -> str:
    bodies = (
        "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
        for fields in entries
    )
    return "".join(f"<{kind}>{fields}</{kind}>" for fields in bodies)


@pytest.fixture(scope="module")
def boto3_client():
    return build_client(SourceSettings(bucket="bucket", anonymous=True))


@pytest.mark.parametrize("operation", ["ListObjectsV2", "ListObjectVersions"])
@given(ENTRIES, ENTRIES, st.sampled_from(["", ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"']))
def test_entries_are_read_as_boto3_reads_them(boto3_client, operation, first, second, namespace):
    kinds = (
        ("Version", "DeleteMarker")
        if operation == "ListObjectVersions"
        else ("Contents", "Contents")
    )
    rest = (
        "<IsTruncated>true</IsTruncated><Name>b</Name>"
        "<CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes>"
    )
    body = f"<R{namespace}>{elements(kinds[0], first)}{rest}{elements(kinds[1], second)}</R>"
    answer = {"status_code": 200, "headers": {}, "body": body.encode()}
    model = boto3_client.meta.service_model.operation_model(operation)
    parser = create_parser("rest-xml")
    expected = parser.parse(answer, model.output_shape)
    for kind in expected.keys() & {"Contents", "Versions", "DeleteMarkers"}:
        expected[kind] = [
            {name: entry[name] for name in entry.keys() & READ} for entry in expected[kind]
        ]
    entries: dict[str, object] = {}
    boto3_client.meta.events.emit(
        f"before-parse.s3.{operation}",
        operation_model=model,
        response_dict=answer,
        customized_response_dict=entries,
    )
    assert bool(entries) == bool(first or second)
    assert parser.parse(answer, model.output_shape) | entries == expected


def test_every_field_of_boto3_is_parsed_or_omitted_deliberately(boto3_client):
    boto3_fields = {
        name
        for operation, kinds in {
            "ListObjectsV2": ["Contents"],
            "ListObjectVersions": ["Versions", "DeleteMarkers"],
        }.items()
        for kind in kinds
        for name in boto3_client.meta.service_model.operation_model(operation)
        .output_shape.members[kind]
        .member.members
    }
    assert boto3_fields - READ == {"Owner", "RestoreStatus"}


# Cycles.


@given(st.integers(0, 30), st.integers(1, 30))
def test_only_repeating_markers_are_a_cycle(lead, period):
    cycle = CycleDetector()
    assert not any(cycle.closes({"m": str(number)}) for number in range(lead + period))
    later = ({"m": str(lead + number % period)} for number in range(4 * (lead + period)))
    assert any(cycle.closes(marker) for marker in later)


@pytest.mark.parametrize("tokens", [["t"], ["t", "u"], ["s", "t", "u", "t", "u"]])
def test_a_listing_that_goes_in_circles_is_refused(scripted_s3, tokens):
    scripted_s3.answer = lambda request: (
        UNVERSIONED
        if "versioning" in request.query
        else page("a", more=tokens[len(scripted_s3.requests) % len(tokens)])
    )
    with pytest.raises(ListingRefused, match="circles"):
        listed(scripted_s3.source())
    assert len(scripted_s3.requests) < 20


# Requests.


def test_pages_are_requested_with_token_and_payer(scripted_s3):
    script(scripted_s3, page("p/a", more="t/1+="), page("p/b"))
    assert [
        obj.key for obj in listed(scripted_s3.source("p/", requester_pays=True), after=b"p/ 0")
    ] == [b"p/a", b"p/b"]
    _, first, second = scripted_s3.requests
    assert (first.query["prefix"], first.query["start-after"], first.query["encoding-type"]) == (
        "p/",
        "p/ 0",
        "url",
    )
    assert second.query["continuation-token"] == "t/1+="
    assert {request.headers["x-amz-request-payer"] for request in (first, second)} == {"requester"}


def test_keys_before_the_start_are_filtered(scripted_s3):
    assert [obj.key for obj in listed(script(scripted_s3, page("a", "b", "c")), after=b"b")] == [
        b"c"
    ]


def test_empty_pages_do_not_count_against_the_bound(scripted_s3):
    source = script(
        scripted_s3,
        page(more="1"),
        page("a", more="2"),
        page(more="3"),
        page("b", more="4"),
        page("c"),
    )
    assert [len(objects) for objects in source.list_pages(max_pages=2)] == [1, 1]


def test_an_anonymous_listing_is_not_signed(scripted_s3):
    script(scripted_s3, page("a"))
    listed(scripted_s3.source(anonymous=True, access_key_id=None, secret_access_key=None))
    assert all("authorization" not in request.headers for request in scripted_s3.requests)


@pytest.mark.parametrize(
    ("fields", "checksum"),
    [
        (
            {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"},
            "CRC64NVME/FULL_OBJECT",
        ),
        ({"ChecksumAlgorithm": "SHA256", "ChecksumType": "COMPOSITE"}, "SHA256/COMPOSITE"),
        ({"ChecksumAlgorithm": "SHA1"}, "SHA1"),
        ({"ChecksumType": "FULL_OBJECT"}, ""),
        ({}, ""),
    ],
)
def test_the_checksum_is_kept_as_listed(scripted_s3, fields, checksum):
    assert [obj.checksum for obj in listed(script(scripted_s3, page("a", **fields)))] == [checksum]


# Versions.


def test_listing_yields_latest_versions_and_no_deleted_objects(scripted_s3):
    more = (
        "<NextKeyMarker>b+%2B%C3%A9</NextKeyMarker><NextVersionIdMarker>v/3</NextVersionIdMarker>"
    )
    first = (
        version("a", "v2", True)
        + version("a", "v1", False)
        + version("b+%2B%C3%A9", "v4", True, "DeleteMarker")
    )
    second = version("b+%2B%C3%A9", "v3", False) + version("c", "null", True)
    source = script(scripted_s3, listing(first, more), listing(second), versioning=VERSIONED)
    assert [(obj.key, obj.version_id) for obj in listed(source)] == [(b"a", "v2"), (b"c", None)]
    query = scripted_s3.requests[2].query
    assert (query["key-marker"], query["version-id-marker"]) == ("b +é", "v/3")


def test_a_version_listing_continues_after_a_key(scripted_s3):
    source = script(
        scripted_s3,
        listing(version("b", "v1", True) + version("c", "v1", True)),
        versioning=VERSIONED,
    )
    assert [obj.key for obj in listed(source, after=b"b")] == [b"c"]
    assert scripted_s3.requests[1].query["key-marker"] == "b"


@pytest.mark.parametrize(
    "refusal",
    [
        s3_error(403, "AccessDenied"),
        s3_error(501, "NotImplemented"),
        s3_error(405, "MethodNotAllowed"),
        s3_error(400, "X"),
    ],
)
def test_unknown_versioning_is_listed_without_versions(scripted_s3, refusal):
    source = script(scripted_s3, page("a"), versioning=refusal)
    assert [(obj.key, obj.version_id) for obj in listed(source)] == [(b"a", None)]


# Refusals.


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        (page("a%zz"), "not percent-encoded"),
        (page("a", ETag=None), "without ETag"),
        (page("a", Size=None), "without Size"),
        (page("a", ETag='"e\n1"'), "impossible ETag"),
        (page("a", ETag="e" * 1025), "impossible ETag"),
        (page("a", LastModified="0001-01-01T00:00:00+05:00"), "impossible LastModified"),
        (page("a", LastModified="9" * 20), "cannot be read"),
        (page("a", Size="-1"), "impossible Size, -1"),
        (page("a", Size=str(2**53 + 1)), "impossible Size, 9007199254740993"),
        (page("a", Size=str(2**64)), "impossible Size"),
        (page("a", LastModified=None), "without LastModified"),
        (listing("<Contents><Size>1</Size></Contents>"), "without Key"),
        (page(""), "without Key"),
        (listing("", truncated=True), "continuation marker"),
        (page("a", count=2), "1 keys whose KeyCount is 2"),
        (page(count=1), "0 keys whose KeyCount is 1"),
        (ScriptedAnswer(200, b"<html>Please log in</html>"), "not a listing"),
        (ScriptedAnswer(200, b""), "not a listing"),
        (page("a", Size="many"), "cannot be read"),
        (page("a", LastModified="yesterday"), "cannot be read"),
        (s3_error(400, "InvalidArgument"), "InvalidArgument"),
    ],
)
def test_a_listing_that_breaks_the_protocol_is_refused(scripted_s3, answer, fact):
    with pytest.raises(ListingRefused, match=fact):
        listed(script(scripted_s3, answer))


@pytest.mark.parametrize("count", [None, 0, 1, 2, 1001, 50493])
def test_a_page_with_another_key_count_is_accepted(scripted_s3, count):
    """SeaweedFS sends 0, Swift nothing, and s3ninja the number of all keys."""
    assert [obj.key for obj in listed(script(scripted_s3, page("a", "b", count=count)))] == [
        b"a",
        b"b",
    ]


def test_unrequested_prefixes_count_as_keys_of_a_page(scripted_s3):
    body = (
        f"<Contents>{entry('a')}</Contents>"
        "<CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes><KeyCount>2</KeyCount>"
    )
    assert [obj.key for obj in listed(script(scripted_s3, listing(body)))] == [b"a"]


def test_a_listing_that_ignores_the_prefix_is_refused(scripted_s3):
    script(scripted_s3, page("p/a", "q/a"))
    with pytest.raises(ListingRefused, match="prefix 'p/'"):
        listed(scripted_s3.source("p/"))


def test_an_empty_storage_class_is_standard(scripted_s3):
    assert [
        obj.storage_class for obj in listed(script(scripted_s3, page("a", StorageClass="")))
    ] == ["STANDARD"]


@pytest.mark.parametrize(
    "marker", ["<NextKeyMarker>%FF</NextKeyMarker>", "<NextKeyMarker>%z</NextKeyMarker>", ""]
)
def test_a_version_listing_without_valid_marker_is_refused(scripted_s3, marker):
    with pytest.raises(ListingRefused):
        listed(
            script(
                scripted_s3,
                listing(version("a", "1", True), marker, truncated=True),
                versioning=VERSIONED,
            )
        )


DENIED = [
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "RequestTimeTooSkewed",
]


@pytest.mark.parametrize("first", ["versioning", "listing"])
@pytest.mark.parametrize(
    ("answer", "error", "fact"),
    [
        *[(s3_error(403, code), SourceDenied, "at http") for code in DENIED],
        (s3_error(404, "NoSuchBucket"), BucketMissing, "at http"),
        (s3_error(404, "XAdminUserNotFound"), ListingRefused, "XAdminUserNotFound"),
        (s3_error(400, "AuthorizationHeaderMalformed"), SourceDenied, "credentials"),
        (s3_error(503, "SlowDown"), SourceUnreachable, "SlowDown"),
        (s3_error(500, "InternalError"), SourceUnreachable, "InternalError"),
        (ScriptedAnswer(502, b"<html>"), SourceUnreachable, "502"),
    ],
)
def test_source_errors_have_a_hint(scripted_s3, first, answer, error, fact):
    source = script(
        scripted_s3, answer, versioning=answer if first == "versioning" else UNVERSIONED
    )
    with pytest.raises(error, match=fact) as caught:
        listed(source)
    assert caught.value.hint
    assert "bucket-of-script" in str(caught.value)
    assert SECRET not in f"{caught.value}{caught.value.hint}"
    assert KEY_ID not in f"{caught.value}{caught.value.hint}"


HTML = {"Content-Type": "text/html; charset=utf-8"}


@pytest.mark.parametrize(
    ("answer", "fact", "hint"),
    [
        (
            s3_error(403, "InvalidAccessKeyId"),
            "access key",
            "CAF_SOURCES__DEMO__ACCESS_KEY_ID",
        ),
        (
            s3_error(403, "SignatureDoesNotMatch"),
            "secret key",
            "CAF_SOURCES__DEMO__SECRET_ACCESS_KEY",
        ),
        (s3_error(404, "NoSuchBucket"), "bucket 'bucket-of-script'", "sources.demo.bucket"),
        (s3_error(403, "AccessDenied"), "bucket 'bucket-of-script'", "s3:ListBucket"),
        (
            s3_error(
                400,
                "AuthorizationHeaderMalformed",
                message="the region is wrong; expecting 'eu-test-1'",
            ),
            "'eu-test-1'",
            "sources.demo.region",
        ),
        (ScriptedAnswer(200, b"<html>Please log in</html>", HTML), "not a listing", "S3 API"),
        (
            ScriptedAnswer(404, b"<html><br></html>", HTML),
            "web page with HTTP status 404",
            "sources.demo.endpoint_url",
        ),
        (ScriptedAnswer(403, b"<html><br></html>", HTML), "web page", "S3 API"),
        (ScriptedAnswer(404, b"not found"), "HTTP status 404", "S3 API"),
        (
            ScriptedAnswer(301, b"", {"Location": "https://s3.here/"}),
            "https://s3.here/",
            "sources.demo.endpoint_url",
        ),
    ],
)
def test_causes_of_source_errors_are_distinct(scripted_s3, answer, fact, hint):
    scripted_s3.answer = lambda request: answer
    with pytest.raises(SourceError, match=re.escape(fact)) as caught:
        listed(scripted_s3.source())
    assert hint in caught.value.hint
    assert caught.value.permanent


BOMB = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10 if n else "lol"}">' for n in range(10))
DOCTYPES = {
    "an entity bomb": f"<!DOCTYPE x [{BOMB}]><x>&e9;</x>",
    "an external entity": '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>',
    "a parameter entity": '<!DOCTYPE x [<!ENTITY % e SYSTEM "http://127.0.0.1:1/"> %e;]><x/>',
    "a harmless entity": '<!DOCTYPE x [<!ENTITY e "k">]>'
    + page("&e;").body.decode().replace("&amp;", "&"),
}


@pytest.mark.parametrize("first", ["versioning", "listing"])
@pytest.mark.parametrize("body", DOCTYPES.values(), ids=DOCTYPES)
@pytest.mark.parametrize("headers", [{"Content-Type": "application/xml"}, {}])
def test_a_document_type_in_an_answer_is_refused(scripted_s3, first, body, headers):
    answer = ScriptedAnswer(200, body.encode(), headers)
    with pytest.raises(ListingRefused, match="document type declaration") as caught:
        listed(
            script(scripted_s3, answer, versioning=answer if first == "versioning" else UNVERSIONED)
        )
    assert "status" not in str(caught.value)
    # A retry would not help.
    assert len(scripted_s3.requests) == 1 + (first == "listing")


@pytest.mark.parametrize("first", ["versioning", "listing"])
def test_malformed_xml_is_reported_without_a_status(scripted_s3, first):
    answer = ScriptedAnswer(
        200, b"<ListBucketResult><Contents>", {"Content-Type": "application/xml"}
    )
    with pytest.raises(SourceUnreachable, match="no element found") as caught:
        listed(
            script(scripted_s3, answer, versioning=answer if first == "versioning" else UNVERSIONED)
        )
    assert "status" not in str(caught.value)


def test_html_with_a_doctype_is_a_web_page(scripted_s3):
    scripted_s3.answer = lambda request: ScriptedAnswer(200, b"<!DOCTYPE html><html/>", HTML)
    with pytest.raises(SourceUnreachable, match="web page"):
        listed(scripted_s3.source())


def test_a_bucket_of_another_region_names_the_setting(scripted_s3):
    # boto3 sends a HEAD to find the bucket's region; this server does not report it.
    scripted_s3.answer = lambda request: (
        ScriptedAnswer() if request.method == "HEAD" else s3_error(301, "PermanentRedirect")
    )
    with pytest.raises(SourceError, match="another region") as caught:
        listed(scripted_s3.source())
    assert "sources.demo.region" in caught.value.hint


def test_a_transiently_failing_page_is_requested_again(scripted_s3):
    source = script(scripted_s3, page("a", more="1"), s3_error(503, "SlowDown"), page("b"))
    assert [obj.key for obj in listed(source)] == [b"a", b"b"]
    assert (
        scripted_s3.requests[-1].query["continuation-token"]
        == scripted_s3.requests[-2].query["continuation-token"]
        == "1"
    )


def test_a_truncated_page_is_requested_again(scripted_s3):
    cut = page("a", "b")
    cut.body = cut.body[:-30]
    assert [obj.key for obj in listed(script(scripted_s3, cut, page("a", "b")))] == [b"a", b"b"]


def test_a_page_is_requested_up_to_the_attempts(scripted_s3):
    with pytest.raises(SourceUnreachable):
        listed(script(scripted_s3, s3_error(503, "SlowDown")))
    assert len([request for request in scripted_s3.requests if "list-type" in request.query]) == 2
