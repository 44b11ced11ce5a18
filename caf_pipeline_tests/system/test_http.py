"""Guarded HTTP: its limits hold at each step of an exchange, and the proxy that the environment
names is used.
"""

import itertools
import os
import threading

import httpx
import pytest

from caf_pipeline.errors import LeaseLost
from caf_pipeline.system.http import GuardedTransport, Limit, guarded_pool
from caf_pipeline_tests.support.scripted_provider import answer, scripted

PROXY_VARIABLES = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch):
    for name in [name for name in os.environ if name.lower() in PROXY_VARIABLES]:
        monkeypatch.delenv(name)


def get(url, limit=None, permit=None):
    with httpx.Client(transport=GuardedTransport(*([permit] if permit else []))) as client:
        return client.get(url, extensions=(limit or Limit(30)).extensions)


class Refused(Exception):
    pass


def refuse(host, addresses):
    raise Refused(host, addresses)


def test_a_request_goes_by_the_proxy_that_the_environment_names(monkeypatch):
    with scripted(answer(200, b"by proxy")) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("http://", "http://user:secret@"))
        assert get("http://site.example:81/a?b").content == b"by proxy"
    (request,) = proxy.requests
    assert request.path == "http://site.example:81/a?b"
    assert request.headers["host"] == "site.example:81"
    assert request.headers["proxy-authorization"] == "Basic dXNlcjpzZWNyZXQ="


def test_over_tls_the_proxy_is_asked_for_a_tunnel(monkeypatch):
    with scripted(answer(403)) as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.url.removeprefix("http://"))
        with pytest.raises(httpx.ProxyError):
            get("https://site.example/")
    assert (proxy.requests[0].method, proxy.requests[0].path) == ("CONNECT", "site.example:443")


@pytest.mark.parametrize("excepted", ["127.0.0.1", "*", "other.example, 127.0.0.1"])
def test_a_host_that_no_proxy_names_is_connected_to_directly(monkeypatch, excepted):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", excepted)
    with scripted(answer(200, b"directly")) as script:
        assert get(script.url).content == b"directly"


def test_a_proxy_may_be_where_no_server_may_be(monkeypatch):
    with scripted(answer(200)) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert get("http://site.example/", permit=refuse).status_code == 200


def test_addresses_are_checked_before_connecting():
    with scripted(answer(200)) as script:
        with pytest.raises(Refused) as caught:
            get(script.url, permit=refuse)
        assert caught.value.args == ("127.0.0.1", ["127.0.0.1"])
    assert not script.connections


@pytest.mark.parametrize("by_proxy", [True, False])
def test_headers_that_trickle_have_an_end(monkeypatch, by_proxy):
    over = threading.Event()

    def trickle(request, sock):
        sock.sendall(b"HTTP/1.1 200 OK\r\n")
        while not over.wait(0.05):
            sock.sendall(b"X-More: 1\r\n")

    with scripted(trickle) as script:
        if by_proxy:
            monkeypatch.setenv("http_proxy", script.url)
        with pytest.raises(httpx.ReadTimeout):
            get("http://site.example/" if by_proxy else script.url, Limit(0.3))
        over.set()


def test_silence_ends_an_exchange_before_its_time():
    with scripted(lambda request, sock: sock.recv(1)) as script, pytest.raises(httpx.ReadTimeout):
        get(script.url, Limit(600, silence=0.1))


def test_check_ends_a_request_that_the_server_does_not_read():
    looks = itertools.count()

    def check():
        if next(looks) > 5:
            raise LeaseLost("gone")

    def unread(request, sock):
        left.wait(30)

    left = threading.Event()
    with scripted(unread) as script:
        with guarded_pool() as pool, pytest.raises(LeaseLost):
            pool.request(
                "POST",
                script.url,
                content=itertools.repeat(bytes(1 << 20)),
                extensions=Limit(60, check=check).extensions,
            )
        left.set()


def test_early_answer_stops_the_request_body():
    sent = itertools.count()

    def refuses(request, sock):
        sock.sendall(answer(413, b"too large", Connection="close"))
        left.wait(30)

    left = threading.Event()
    body = (bytes(1 << 10) for _ in iter(lambda: next(sent), 1 << 30))
    with scripted(refuses) as script:
        with guarded_pool() as pool:
            assert (
                pool.request(
                    "POST", script.url, content=body, extensions=Limit(60).extensions
                ).content
                == b"too large"
            )
        left.set()
    assert next(sent) < 1 << 20
