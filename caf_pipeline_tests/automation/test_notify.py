"""E-mail over TLS, to servers that are trusted, strangers, and ones that would have the password in
the clear.
"""

import socketserver
import threading
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import pytest

from caf_pipeline.automation.notify import send_mail
from caf_pipeline.errors import AlertNotSent

PASSWORD = "a-password-that-no-message-may-hold"


class Smtp(socketserver.BaseRequestHandler):
    """Takes every e-mail of who has logged in, as RFC 5321, 3207 and 4954 have it; what it read is
    kept.
    """

    def handle(self) -> None:
        with suppress(OSError), ExitStack() as opened:  # who distrusts the server goes
            self.talk(opened)

    def talk(self, opened: ExitStack) -> None:
        def made_safe(connection):
            return opened.enter_context(server.tls.wrap_socket(connection, server_side=True))

        server, connection = self.server, self.request
        if server.security == "tls":
            connection = made_safe(connection)
        file = opened.enter_context(connection.makefile("rwb", buffering=0))
        file.write(b"220 here\r\n")
        while line := file.readline():
            word = line[:4].upper()
            server.got.append(line.decode().strip())
            if word == b"STAR":
                file.write(b"220 go ahead\r\n")
                file = opened.enter_context(made_safe(connection).makefile("rwb", buffering=0))
                server.got.append("from here on by TLS")
            elif word == b"EHLO":
                offers = b"250-STARTTLS\r\n" if server.security == "starttls" else b""
                file.write(b"250-here\r\n" + offers + b"250 AUTH PLAIN\r\n")
            elif word == b"AUTH":
                file.write(b"235 welcome\r\n" if server.lets_in else b"535 no: " + line[5:])
            elif word == b"DATA":
                file.write(b"354 go on\r\n")
                while (line := file.readline()) != b".\r\n":
                    server.got.append(line.decode().strip())
                file.write(b"250 ok\r\n")
            else:
                file.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")


@pytest.fixture
def mail(tls):
    @contextmanager
    def serving(security: str, *, lets_in: bool = True):
        with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Smtp) as server:
            server.got, server.security, server.tls, server.lets_in = [], security, tls, lets_in
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            try:
                yield server
            finally:
                server.shutdown()
                thread.join()

    return serving


def send(server, security: str) -> None:
    to = partial(
        send_mail,
        "A subject",
        "A text",
        sender="caf@example.org",
        to=["ops@example.org"],
        seconds=10,
    )
    to(host="localhost", port=server.server_address[1], security=security, login=("caf", PASSWORD))


@pytest.fixture
def _trusted(certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))


@pytest.mark.usefixtures("_trusted")
@pytest.mark.parametrize("security", ["tls", "starttls"])
def test_email_and_login_are_sent_by_tls(mail, security):
    with mail(security) as server:
        send(server, security)
    assert "A text" in server.got
    assert "Subject: A subject" in server.got
    if security == "starttls":
        before = server.got[: server.got.index("from here on by TLS")]
        assert [line.split()[0].upper() for line in before] == ["EHLO", "STARTTLS"]


@pytest.mark.parametrize("security", ["tls", "starttls"])
def test_untrusted_server_receives_neither_login_nor_text(mail, security):
    with mail(security) as server, pytest.raises(AlertNotSent, match="certificate"):
        send(server, security)
    assert not any(line.startswith(("AUTH", "MAIL", "A text")) for line in server.got)


@pytest.mark.usefixtures("_trusted")
def test_nothing_is_sent_if_starttls_is_not_offered(mail):
    with mail("none") as server, pytest.raises(AlertNotSent, match="STARTTLS"):
        send(server, "starttls")
    assert not any(line.startswith(("AUTH", "MAIL", "A text")) for line in server.got)


@pytest.mark.usefixtures("_trusted")
def test_a_login_that_is_refused_is_told_without_the_password(mail):
    with (
        mail("tls", lets_in=False) as server,
        pytest.raises(AlertNotSent, match="refuses the login") as refused,
    ):
        send(server, "tls")
    assert any(line.startswith("AUTH") for line in server.got)
    told = f"{refused.value} {refused.value.hint} {refused.value.__cause__}"
    sent = next(line for line in server.got if line.startswith("AUTH")).split()[-1]
    assert PASSWORD not in told
    assert sent not in told
