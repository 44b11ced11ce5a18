"""Hosts that strangers name: none at this machine or its network is connected to, by whichever
spelling, name or redirect.

What listens on 127.0.0.1 in these tests stands for what listens on an operator's machine and trusts
whoever reaches it.
"""

import gc
import socket
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial

import pytest

from caf_pipeline.errors import CafError, SourceError, StoreUnreachable
from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.records import PostRecord
from caf_pipeline.settings import JackalSettings
from caf_pipeline.source.s3.ranges import S3File
from caf_pipeline.store.jackal.answers import Provider
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline.store.jackal.provider import ProviderClient
from caf_pipeline.store.jackal.provider_http import ask, parse_address
from caf_pipeline.store.jackal.provider_selection import ProviderSelection
from caf_pipeline.system import ranges
from caf_pipeline.system.addresses import is_public
from caf_pipeline_tests.support.jackal_stores import MemoryRecords, open_store
from caf_pipeline_tests.support.s3_server import ScriptedAnswer
from caf_pipeline_tests.support.scripted_lcd import CHAIN_ID, ScriptedAnswer, ScriptedLcd
from caf_pipeline_tests.support.scripted_provider import answer, scripted
from caf_pipeline_tests.support.tiers import sampled

open_ranges = partial(ranges.open_ranges, open_s3=S3File)

POSTING = PostRecord(bytes(32), "jkl1owner", 7, 10)
REDIRECTS = (301, 302, 303, 307, 308)
PUBLIC = "93.184.216.34"

NOT_PUBLIC = {
    "0.0.0.0": "unspecified",
    "0.1.2.3": "this network",
    "10.0.0.1": "private",
    "100.64.0.1": "carrier's NAT",
    "100.127.255.255": "carrier's NAT",
    "127.0.0.1": "loopback",
    "127.255.255.254": "loopback",
    "169.254.169.254": "link-local",
    "172.16.0.1": "private",
    "172.31.255.255": "private",
    "192.0.0.8": "protocols",
    "192.0.2.1": "documentation",
    "192.168.1.1": "private",
    "198.18.0.1": "benchmarks",
    "198.51.100.1": "documentation",
    "203.0.113.1": "documentation",
    "224.0.0.1": "multicast",
    "239.255.255.255": "multicast",
    "240.0.0.1": "reserved",
    "255.255.255.255": "broadcast",
    "::": "unspecified",
    "::1": "loopback",
    "::127.0.0.1": "IPv4-compatible",
    "::ffff:127.0.0.1": "mapped",
    "::ffff:a00:1": "mapped",
    "::ffff:169.254.169.254": "mapped",
    "64:ff9b::7f00:1": "NAT64",
    "64:ff9b::10.0.0.1": "NAT64",
    "64:ff9b:1::1": "local NAT64",
    "100::1": "discard",
    "2001::1": "Teredo",
    "2001:db8::1": "documentation",
    "2002:7f00:1::1": "6to4",
    "2002:c0a8:101::1": "6to4",
    "3fff::1": "documentation",
    "5f00::1": "segment routing",
    "fc00::1": "unique-local",
    "fd12:3456::1": "unique-local",
    "fe80::1": "link-local",
    "fe80::1%eth0": "link-local with a zone",
    "2606:4700::1%1": "a zone",
    "fec0::1": "site-local",
    "ff02::1": "multicast",
    "localhost": "a name",
    "127.1": "a short spelling",
    "": "nothing",
}


@pytest.mark.parametrize(
    "address", NOT_PUBLIC, ids=lambda address: f"{address} {NOT_PUBLIC[address]}"
)
def test_private_and_reserved_addresses_are_not_public(address):
    assert not is_public(address)


IS_PUBLIC = [
    "1.1.1.1",
    PUBLIC,
    "100.63.255.255",
    "100.128.0.1",
    "172.32.0.1",
    "223.255.255.255",
    "2606:4700::1111",
    "2a00::1",
]
STANDS_FOR_PUBLIC = ["::ffff:1.1.1.1", "64:ff9b::1.1.1.1", "2002:101:101::1"]


@pytest.mark.parametrize("address", IS_PUBLIC + STANDS_FOR_PUBLIC)
def test_an_address_of_the_public_network_is_public(address):
    assert is_public(address)


# --- providers
# ------------------------------------------------------------------------------------------


@contextmanager
def trap():
    """A provider on this machine that would answer anybody; nobody may have connected to it in the
    end.
    """
    with scripted(answer(200, '{"version":"caught"}')) as script:
        yield script, int(script.url.rpartition(":")[2])
    assert script.connections == 0


SPELLINGS = [
    "127.0.0.1",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0x7f.0.0.1",
    "0177.0.0.1",
    "017700000001",
    "0.0.0.0",
    "0",
    "localhost",
    "LOCALHOST",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::]",
]


@pytest.mark.parametrize("host", SPELLINGS)
def test_no_spelling_of_this_machine_is_connected_to(host):
    with (
        trap() as (_, port),
        pytest.raises(StoreUnreachable, match=r"jackal\.allow_private_addresses"),
    ):
        ask(parse_address(f"http://{host}:{port}"), "/version")


ASKED = {
    "version": lambda client: client.version(),
    "job": lambda client: client.job(POSTING),
    "download": lambda client: list(client.download(POSTING, 0, 10)),
}


@pytest.mark.parametrize("name", ASKED)
def test_nothing_that_a_provider_is_asked_reaches_this_machine(name):
    with trap() as (script, _), pytest.raises(StoreUnreachable, match="allow_private_addresses"):
        ASKED[name](ProviderClient(script.url))


def test_it_is_not_permitted_by_default():
    assert not JackalSettings().allow_private_addresses


def resolving(monkeypatch, *answers):
    """Let each look-up of a name give the next of these lists of addresses, and return the names
    that were looked up.
    """
    looked_up, left = [], list(answers)
    real = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        if not str(host).endswith(".example"):
            return real(host, port, *args, **kwargs)
        looked_up.append(host)
        return [found for address in left.pop(0) for found in real(address, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return looked_up


def test_name_of_this_machine_is_not_connected_to(monkeypatch):
    looked_up = resolving(monkeypatch, ["127.0.0.1", "::1"])
    with trap() as (_, port), pytest.raises(StoreUnreachable, match=r"127\.0\.0\.1, ::1"):
        ask(parse_address(f"http://provider.example:{port}"), "/version")
    assert looked_up == ["provider.example"]


@pytest.fixture
def connected(monkeypatch):
    """Where sockets were to be connected to; those to the public network fail, as there is none
    here.
    """
    reached = []
    real = socket.socket.connect

    def connect(sock, place):
        reached.append(place[0])
        if is_public(place[0]):
            raise ConnectionRefusedError(111, "Connection refused")
        return real(sock, place)

    monkeypatch.setattr(socket.socket, "connect", connect)
    return reached


def test_name_is_resolved_once_for_a_connection(monkeypatch, connected):
    looked_up = resolving(monkeypatch, [PUBLIC], ["127.0.0.1"])
    with trap() as (_, port), pytest.raises(StoreUnreachable, match="reached"):
        ask(parse_address(f"http://provider.example:{port}"), "/version")
    assert looked_up == ["provider.example"]
    assert connected == [PUBLIC]


def test_only_some_public_addresses_are_tried(monkeypatch, connected):
    many = [f"1.1.1.{number}" for number in range(9)]
    resolving(monkeypatch, ["127.0.0.1", *many, "10.0.0.1"])
    with trap() as (_, port), pytest.raises(StoreUnreachable, match="reached"):
        ask(parse_address(f"http://provider.example:{port}"), "/version")
    assert connected == many[:4]


@pytest.mark.parametrize(
    "host", ["a..b", f"{'a' * 64}.example", f"{'a.' * 4000}example", ".example", "xn--a"]
)
def test_a_name_that_nobody_can_look_up_is_one_sentence(host):
    with pytest.raises(StoreUnreachable, match="provider http"):
        ask(parse_address(f"http://{host}"), "/version")


@pytest.mark.parametrize("status", sampled(REDIRECTS, every=len(REDIRECTS)))
@pytest.mark.parametrize("name", ASKED)
def test_no_redirect_of_a_provider_is_followed(status, name):
    with (
        trap() as (elsewhere, _),
        scripted(answer(status, Location=f"{elsewhere.url}/x")) as script,
    ):
        client = ProviderClient(script.url, may_be_private=True)
        try:
            told = ASKED[name](client)
        except StoreUnreachable:
            told = ""
        client.close()
        assert not told
        assert {request.path for request in script.requests} <= {
            request.path for request in script.requests[:1]
        }


class Lists:
    """A chain that lists one provider at an address."""

    def __init__(self, url):
        self.listed = [Provider("jkl1bad", url, 0)]

    def providers(self):
        return self.listed

    def active_providers(self):
        return {"jkl1bad"}


def test_the_selection_hands_the_setting_to_its_clients():
    with scripted(answer(200, '{"version":"1"}')) as script:
        for allowed in (True, False):
            selection = ProviderSelection(
                Lists(script.url), MemoryRecords(), allow_private_addresses=allowed
            )
            client = selection.client("jkl1bad")
            assert client.may_be_private is allowed
            selection.close()


def test_providers_on_this_machine_are_passed_over_like_unreachable_ones(network, tmp_path):
    path = tmp_path / "chunk.caf"
    path.write_bytes(bytes(100_000))
    before = open_store(network, copies=1)
    posting = before.posted(path)
    before.store.close()
    opened = open_store(network, before.log, allow_private_addresses=False, copies=1)
    try:
        with pytest.raises(StoreUnreachable, match=r"jackal\.allow_private_addresses") as caught:
            opened.store.put(posting, path, lambda _: None)
        assert type(caught.value).__name__ == "NoProvider"
        assert not +opened.begun()
    finally:
        opened.store.close()
    allowed = open_store(network, opened.log, copies=1)
    try:
        allowed.store.put(posting, path, lambda _: None)
        assert b"".join(allowed.store.read(posting, 0, 10)) == bytes(10)
    finally:
        allowed.store.close()
    refused = open_store(network, opened.log, allow_private_addresses=False, copies=1)
    try:
        with pytest.raises(StoreUnreachable, match=r"jackal\.allow_private_addresses"):
            b"".join(refused.store.read(posting, 0, 10))
    finally:
        refused.store.close()


# --- chain nodes
# ------------------------------------------------------------------------------------------


CHAIN_ASKED = {
    "blocks/latest": lambda chain: chain.proof_window(),
    "params": lambda chain: chain.proof_window(),
    "/cosmos/tx/v1beta1/txs": lambda chain: chain.broadcast(b"signed"),
}


@pytest.mark.parametrize("status", sampled(REDIRECTS, every=len(REDIRECTS)))
@pytest.mark.parametrize("path", CHAIN_ASKED)
def test_no_redirect_of_a_chain_node_is_followed(status, path):
    with trap() as (elsewhere, _), ScriptedLcd() as node:
        node.answers["params"] = ScriptedAnswer({"params": {"proof_window": "9"}})
        node.answers[path] = ScriptedAnswer({}, status, {"Location": f"{elsewhere.url}/x"})
        chain = Chain(
            Nodes(
                [node.url], CHAIN_ID, seen_height=lambda: 0, see_height=lambda _: None, attempts=1
            )
        )
        with chain, pytest.raises(StoreUnreachable, match=str(status)):
            CHAIN_ASKED[path](chain)


# --- URLs of the command line
# ----------------------------------------------------------------------------------------

BODY = bytes(range(200))


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(ranges, "_BACK_OFF_SECONDS", ())


def whole(request, sock):
    """Answer with the whole file."""
    sock.sendall(answer(200, BODY))


def leading_to(url, status=302):
    return answer(status, Location=url)


def read_all(url):
    with open_ranges(url) as source:
        return source.read_suffix(1000)[0]


def test_a_url_that_was_typed_may_stand_on_this_machine():
    with scripted(whole) as script:
        assert read_all(script.url) == BODY


@pytest.mark.parametrize("status", REDIRECTS)
def test_a_redirect_to_the_named_host_itself_is_followed(status):
    with scripted(whole) as other, scripted(leading_to(f"{other.url}/b", status)) as script:
        assert read_all(script.url) == BODY


@pytest.mark.parametrize(
    "host", ["127.0.0.2", "localhost.example", "[::ffff:127.0.0.2]", "2130706434", "0.0.0.0"]
)
def test_redirect_to_another_private_address_is_not_followed(host, monkeypatch, no_waiting):
    resolving(monkeypatch, ["127.0.0.3"])
    with (
        trap() as (_, port),
        scripted(leading_to(f"http://{host}:{port}/")) as script,
        pytest.raises(SourceError, match="not followed"),
    ):
        read_all(script.url)


def test_public_host_does_not_redirect_to_this_machine(monkeypatch, connected, no_waiting):
    """The named host is public at first; asked again, its name stands for this machine."""
    looked_up = resolving(monkeypatch, [PUBLIC], ["127.0.0.1"])
    with trap() as (_, port), open_ranges(f"http://site.example:{port}/") as source:
        with pytest.raises(CafError, match="cannot be reached"):
            source.read_suffix(10)
        with pytest.raises(SourceError, match="not followed"):
            source.read_suffix(10)
    assert connected == [PUBLIC]
    assert looked_up == ["site.example"] * 2


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://x", "//", "http://", "http://[::1"],
)
def test_redirect_to_an_invalid_url_is_one_sentence(location, no_waiting):
    with scripted(leading_to(location)) as script, pytest.raises(CafError):
        read_all(script.url)


def test_redirects_without_end_have_an_end(no_waiting):
    def on(request, sock):
        sock.sendall(leading_to(f"/{len(script.requests)}"))

    with scripted(on) as script, pytest.raises(SourceError, match="more than 5 times"):
        read_all(script.url)
    assert len(script.requests) == 6


def test_what_a_redirect_says_besides_is_not_read():
    def on(request, sock):
        sock.sendall(
            leading_to(f"{other.url}/").replace(
                b"Content-Length: 0", b"Content-Length: 99999999999"
            )
        )
        sock.sendall(b"x" * 1000)

    with scripted(whole) as other, scripted(on) as script:
        assert read_all(script.url) == BODY


# botocore leaves the connection of a redirect to the garbage collector.
LEFT_OPEN = pytest.mark.filterwarnings(
    "ignore:unclosed", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def tidy():
    """Collects what botocore left, so that no other test is warned of it."""
    yield
    gc.collect()


S3_OBJECT = S3Object(b"plain", None, "e1", 5, datetime(2026, 11, 1, tzinfo=UTC), "STANDARD", "")

S3_ASKED = {
    "list": lambda source: list(source.list_pages()),
    "get": lambda source: source.read(S3_OBJECT, 0, 5),
    "url": lambda _: read_all("s3://bucket/key"),
}


@LEFT_OPEN
@pytest.mark.usefixtures("tidy", "no_waiting")
@pytest.mark.parametrize("status", sampled(REDIRECTS, every=len(REDIRECTS)))
@pytest.mark.parametrize("name", S3_ASKED)
def test_no_redirect_of_an_s3_server_is_followed(status, name, scripted_s3, monkeypatch):
    """A bucket's region and its endpoint are settings, and no server's word."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", scripted_s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with trap() as (elsewhere, _):
        scripted_s3.answer = lambda request: ScriptedAnswer(
            status, headers={"Location": f"{elsewhere.url}/bucket/key"}
        )
        with pytest.raises(CafError):
            S3_ASKED[name](scripted_s3.source())
