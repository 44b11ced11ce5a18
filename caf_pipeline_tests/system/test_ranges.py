"""Ranges of local files, of real HTTP servers good and bad, and of a real S3 server."""

import errno
import os
import socket
from functools import partial

import boto3
import pytest
from moto.server import ThreadedMotoServer

from caf_pipeline.caf.archive import CafReader, StreamingSource
from caf_pipeline.errors import ArchiveError, BucketMissing, SourceUnreachable, UsageError
from caf_pipeline.errors import SourceDenied as Denied
from caf_pipeline.source.s3.ranges import S3File
from caf_pipeline.system import ranges
from caf_pipeline_tests.support.memory_ranges import caf_bytes, index_of
from caf_pipeline_tests.support.range_server import Site, serving

open_ranges = partial(ranges.open_ranges, open_s3=S3File)

CONTENT = bytes(range(256)) * 4000
ARCHIVE = caf_bytes(bytes(200_000), index_of(("a", 5, 100_005), ("z", 199_999, 200_000)))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(ranges, "_BACK_OFF_SECONDS", (0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def s3_server():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server, monkeypatch, tmp_path):
    """An S3 server with one bucket, found by the environment alone."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", region_name="us-east-1", endpoint_url=s3_server)
    client.create_bucket(Bucket="archive")
    yield client
    client.close()


def check_ranges(address: str, content: bytes) -> None:
    with open_ranges(address) as source:
        assert isinstance(source, StreamingSource)
        assert source.read_suffix(10) == (content[-10:], len(content))
        assert source.read_suffix(len(content) + 1) == (content, len(content))
        assert source.read_prefix(10) == (content[:10], len(content))
        assert source.read_prefix(len(content) + 1) == (content, len(content))
        assert source.read(3, 70_000) == content[3:70_000]
        assert b"".join(source.stream(100, len(content) - 1, 4096)) == content[100:-1]


def test_ranges_of_a_local_file(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    check_ranges(str(tmp_path / "file"), CONTENT)


@pytest.mark.parametrize(
    "habits",
    [{}, {"knows_ranges": False}, {"knows_suffixes": False}, {"failures": 2}],
    ids=str,
)
def test_ranges_of_an_http_server(habits):
    with serving(Site(CONTENT, **habits)) as site:
        check_ranges(site.url, CONTENT)


def test_a_broken_answer_is_resumed_where_it_broke():
    with serving(Site(CONTENT, break_after=300_000)) as site, open_ranges(site.url) as source:
        assert source.read(10, len(CONTENT)) == CONTENT[10:]
        assert site.requests[1].startswith("bytes=300010-")


def test_ranges_of_an_s3_server(s3):
    s3.put_object(Bucket="archive", Key="a/key with ü", Body=CONTENT)
    check_ranges("s3://archive/a/key with ü", CONTENT)


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("habits", [{}, {"knows_ranges": False}], ids=str)
def test_ranges_of_an_s3_server_that_has_no_etags(monkeypatch, habits):
    with serving(Site(CONTENT, etag="", **habits)) as site:
        monkeypatch.setenv("AWS_ENDPOINT_URL", site.url.removesuffix("/file"))
        check_ranges("s3://file/key", CONTENT)


@pytest.mark.usefixtures("s3")
def test_a_wrong_endpoint_is_not_blamed_on_the_objects_address(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "user:a-password@host")
    with pytest.raises(
        UsageError,
        match="http",
    ) as refused:
        open_ranges("s3://archive/key").__enter__()
    assert "AWS_ENDPOINT_URL" in refused.value.hint
    assert "a-password" not in str(refused.value)


def test_without_credentials_s3_is_read_anonymously(s3, monkeypatch):
    s3.put_object(Bucket="archive", Key="public", Body=CONTENT, ACL="public-read")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    check_ranges("s3://archive/public", CONTENT)


def test_one_member_behind_a_url_takes_two_requests():
    with serving(Site(ARCHIVE)) as site, open_ranges(site.url) as source:
        assert CafReader.open(source).read("a") == bytes(100_000)
        assert site.requests == ["bytes=-65536", "bytes=5-100004"]


def test_large_file_on_a_server_without_ranges_is_refused(monkeypatch):
    monkeypatch.setattr(ranges, "MAX_WHOLE_BYTES", 1000)
    with (
        serving(Site(CONTENT, knows_ranges=False)) as site,
        open_ranges(site.url) as source,
        pytest.raises(ArchiveError, match="support ranges"),
    ):
        source.read_suffix(10)


def test_large_file_is_readable_without_suffix_ranges(monkeypatch):
    monkeypatch.setattr(ranges, "MAX_WHOLE_BYTES", 1000)
    with serving(Site(CONTENT, knows_suffixes=False)) as site:
        check_ranges(site.url, CONTENT)


def test_file_replaced_during_reading_is_refused():
    with serving(Site(CONTENT)) as site, open_ranges(site.url) as source:
        source.read_suffix(10)
        site.etag = '"2"'
        with pytest.raises(ArchiveError, match="replaced"):
            source.read(0, 10)


def test_object_replaced_during_reading_is_refused(s3):
    s3.put_object(Bucket="archive", Key="changing", Body=b"one")
    with open_ranges("s3://archive/changing") as source:
        source.read_suffix(10)
        s3.put_object(Bucket="archive", Key="changing", Body=b"two")
        with pytest.raises(ArchiveError, match="replaced"):
            source.read(0, 1)


def test_an_empty_file_has_an_empty_end_and_beginning(tmp_path, s3):
    (tmp_path / "empty").write_bytes(b"")
    s3.put_object(Bucket="archive", Key="empty", Body=b"")
    with serving(Site(b"")) as site:
        for address in (str(tmp_path / "empty"), site.url, "s3://archive/empty"):
            with open_ranges(address) as source:
                assert source.read_suffix(10) == (b"", 0)
                assert source.read_prefix(10) == (b"", 0)


@pytest.mark.parametrize(("path", "error"), [("missing", ArchiveError), ("secret", Denied)])
def test_an_http_refusal_has_its_error(path, error):
    with (
        serving(Site(CONTENT)) as site,
        open_ranges(site.url.replace("file", path)) as source,
        pytest.raises(error),
    ):
        source.read_suffix(10)


@pytest.mark.parametrize(
    ("address", "error"),
    [("s3://archive/missing", ArchiveError), ("s3://no-such-bucket/key", BucketMissing)],
)
def test_an_s3_refusal_has_its_error(s3, address, error):
    with open_ranges(address) as source, pytest.raises(error):
        source.read_suffix(10)


def test_a_server_that_keeps_failing_is_unreachable():
    with (
        serving(Site(CONTENT, failures=99)) as site,
        open_ranges(site.url) as source,
        pytest.raises(SourceUnreachable),
    ):
        source.read_suffix(10)


def test_a_closed_port_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open_ranges(f"http://127.0.0.1:{port}/x") as source, pytest.raises(SourceUnreachable):
        source.read(0, 10)


def test_messages_do_not_name_what_a_url_keeps_secret():
    with serving(Site(CONTENT)) as site:
        url = site.url.replace("127", "user:password@127").replace(
            "file", "missing?X-Amz-Signature=signature"
        )
        with open_ranges(url) as source, pytest.raises(ArchiveError) as caught:
            source.read_suffix(10)
    assert "password" not in str(caught.value)
    assert "signature" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "ftp://host/file",
        "s3://bucket",
        "s3:///key",
        "s3://Bad_Bucket!/key",
        "http://",
        "http://host:port/",
    ],
)
def test_an_address_that_cannot_be_one_is_refused(address):
    with pytest.raises(UsageError):
        open_ranges(address)


def test_pipe_and_folder_are_refused_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing"):
        with pytest.raises(ArchiveError):
            open_ranges(str(path))


def test_local_file_truncated_during_reading_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    with open_ranges(str(tmp_path / "file")) as source:
        os.truncate(tmp_path / "file", 10)
        with pytest.raises(ArchiveError, match="truncated"):
            source.read(0, 100)


@pytest.mark.parametrize("kernel", ["copies", "refuses", "has none"])
def test_a_range_of_a_local_file_is_appended_to_another(tmp_path, monkeypatch, kernel):
    def refuse(*_):
        raise OSError(errno.EXDEV, "another file system")

    if kernel == "refuses":
        monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    elif kernel == "has none":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    (tmp_path / "from").write_bytes(CONTENT * 3)
    with open_ranges(str(tmp_path / "from")) as source, (tmp_path / "to").open("wb") as file:
        file.write(b"before")
        assert (
            ranges.write_piece(file, ranges.LocalRange(source, 7, len(CONTENT) * 3 - 9))
            == len(CONTENT) * 3 - 16
        )
        assert ranges.write_piece(file, b"after") == 5
    assert (tmp_path / "to").read_bytes() == b"before" + (CONTENT * 3)[7:-9] + b"after"


def test_range_of_a_truncated_local_file_is_an_error(tmp_path):
    (tmp_path / "from").write_bytes(CONTENT)
    cut_off = pytest.raises(ArchiveError, match="truncated")
    with (
        open_ranges(str(tmp_path / "from")) as source,
        (tmp_path / "to").open("wb") as file,
        cut_off,
    ):
        ranges.write_piece(file, ranges.LocalRange(source, 0, len(CONTENT) + 1))


def test_a_full_disk_is_told_where_a_range_is_appended(tmp_path):
    (tmp_path / "from").write_bytes(CONTENT)
    no_space = pytest.raises(OSError, match="space")
    with (
        open_ranges(str(tmp_path / "from")) as source,
        open("/dev/full", "wb", buffering=0) as file,
        no_space,
    ):
        ranges.LocalRange(source, 0, 10).write_to(file)
