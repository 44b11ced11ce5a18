"""Servers that are not there, or are something else: each is told apart, for S3 and for the nodes
of a chain.
"""

import contextlib
import socket
import threading
from datetime import timedelta

import pytest

from caf_pipeline.errors import ChainUnreachable, SourceError
from caf_pipeline.source.s3 import clients as s3_clients
from caf_pipeline.source.s3.source import open_s3_source
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline_tests.contracts.object_source import listed
from caf_pipeline_tests.support.s3_server import settings_for


def unreachable(endpoint: str, attempts: int = 2) -> SourceError:
    with pytest.raises(SourceError) as caught:
        listed(open_s3_source("demo", settings_for(endpoint, "bucket"), attempts=attempts))
    return caught.value


def test_https_on_an_http_port_is_reported(scripted_s3):
    error = unreachable(scripted_s3.endpoint.replace("http:", "https:"), attempts=100)
    assert "HTTPS" in str(error)
    assert error.hint.startswith("write http:// in sources.demo.endpoint_url")


@pytest.mark.parametrize(
    ("endpoint", "words", "hint"),
    [
        ("http://127.0.0.1:9", "connection refused", "nothing listens on that port"),
        (
            "http://no-such-host.invalid",
            "its host name does not resolve",
            "check the host name in sources.demo.endpoint_url",
        ),
    ],
)
def test_an_endpoint_that_is_not_there_is_told_apart(endpoint, words, hint):
    error = unreachable(endpoint)
    assert words in str(error)
    assert hint in error.hint
    assert not error.permanent


def test_silent_endpoint_is_reported_as_timeout(monkeypatch):
    monkeypatch.setattr(s3_clients, "READ_TIMEOUT", timedelta(seconds=0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = unreachable(f"http://127.0.0.1:{silent.getsockname()[1]}", attempts=1)
    assert "in time" in str(error)
    assert "firewalls" in error.hint


@pytest.mark.parametrize(
    ("said", "words"), [(b"SSH-2.0-x\r\n", "does not speak HTTP"), (b"", "closes the connection")]
)
def test_a_server_of_something_else_is_told_apart(said, words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=answer_once, args=(server, said))
        answering.start()
        error = unreachable(f"http://127.0.0.1:{server.getsockname()[1]}", attempts=1)
        server.shutdown(
            socket.SHUT_RDWR
        )  # the trial whether it speaks TLS may have been answered, too
        answering.join()
    assert words in str(error)


def answer_once(server: socket.socket, said: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(said)


# --- nodes of a chain
# ------------------------------------------------------------------------------------------


def no_chain(*urls: str, attempts: int = 1) -> ChainUnreachable:
    chain = Chain(
        Nodes(
            urls,
            "a-1",
            seen_height=lambda: 0,
            see_height=lambda _: None,
            attempts=attempts,
            first_wait_seconds=0.01,
            silence_seconds=0.3,
        )
    )
    with chain, pytest.raises(ChainUnreachable) as caught:
        chain.height()
    return caught.value


@pytest.mark.parametrize(
    ("url", "words", "hint"),
    [
        (
            "http://127.0.0.1:9",
            "connection refused",
            "nothing listens on that port: check host and port in jackal.lcd",
        ),
        (
            "http://no-such-host.invalid",
            "its host name does not resolve",
            "check the host name in jackal.lcd",
        ),
    ],
)
def test_a_node_that_is_not_there_is_told_apart(url, words, hint):
    error = no_chain(url)
    assert str(error) == f"{url} cannot be reached: {words}"
    assert hint in error.hint


def test_silent_node_is_reported_as_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = no_chain(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "in time" in str(error)


def test_https_on_a_nodes_http_port_is_reported(scripted_s3):
    error = no_chain(scripted_s3.endpoint.replace("http:", "https:"), attempts=1000)
    assert "HTTPS" in str(error)
    assert error.permanent


def test_web_page_instead_of_a_node_is_reported(scripted_s3):
    error = no_chain(scripted_s3.endpoint)
    assert "REST server" in str(error)
