"""Sends an alert as JSON to a webhook, or as e-mail. One attempt each, with a timeout."""

import logging
import smtplib
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.message import EmailMessage
from typing import Any
from urllib.parse import urlsplit

from caf_pipeline.errors import AlertNotSent, first_line


def post_json(url: str, body: Mapping[str, Any], *, seconds: float) -> None:
    """Post JSON. No error contains the URL's path, which may be secret.

    `seconds` limits each read and write.

    Raises:
        AlertNotSent: The status is not 2xx, or there is no answer.
    """
    import httpx

    server = f"the webhook at {urlsplit(url).hostname}"
    try:
        with _unlogged():
            status = httpx.post(url, json=dict(body), timeout=seconds).status_code
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise AlertNotSent(
            f"{server} does not answer: {_without(url, error)}", hint="check CAF_ALERTS__WEBHOOK"
        ) from None
    if not httpx.codes.is_success(status):
        raise AlertNotSent(
            f"{server} answers with HTTP status {status}", hint="check CAF_ALERTS__WEBHOOK"
        )


@contextmanager
def _unlogged() -> Iterator[None]:
    # httpx logs URLs at the level INFO, and the URL of a webhook may be a secret. Other threads may
    # use httpx for other programs.
    logger, thread = logging.getLogger("httpx"), threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        logger.removeFilter(is_of_another_thread)


def _without(url: str, error: Exception) -> str:
    """Return an error's message, or its class name if the message contains the URL."""
    message = first_line(error)
    has_url = url in message or urlsplit(url).path.strip("/") in message
    return type(error).__name__ if has_url else message


def send_mail(
    subject: str,
    text: str,
    *,
    sender: str,
    to: Sequence[str],
    host: str,
    port: int,
    security: str,
    login: tuple[str, str] | None,
    seconds: float,
) -> Sequence[str]:
    """Send an e-mail; return the refused recipients.

    `security` is `starttls`, `tls` or `none`; `login` is user and password. `seconds` limits each
    read and write.

    Raises:
        AlertNotSent: The server accepted no recipient, or failed.
    """
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = subject, sender, ", ".join(to)
    message.set_content(text)
    trust = ssl.create_default_context()
    hint = "check alerts.smtp_host, alerts.smtp_port and alerts.smtp_security"
    try:
        if security == "tls":
            server: smtplib.SMTP = smtplib.SMTP_SSL(host, port, timeout=seconds, context=trust)
        else:
            server = smtplib.SMTP(host, port, timeout=seconds)
        with server:
            if security == "starttls":
                server.starttls(context=trust)
            if login:
                server.login(*login)
            return list(server.send_message(message))
    except smtplib.SMTPAuthenticationError:  # its message may contain the password
        raise AlertNotSent(
            f"the mail server {host}:{port} refuses the login", hint="check alerts.smtp_user"
        ) from None
    except UnicodeError:  # its message contains the password
        hint = "write alerts.smtp_user, CAF_ALERTS__SMTP_PASSWORD and the addresses in ASCII"
        raise AlertNotSent(
            f"the login or an address is not ASCII, as the mail server {host}:{port} requires",
            hint=hint,
        ) from None
    except (smtplib.SMTPException, OSError) as error:
        raise AlertNotSent(
            f"the mail server {host}:{port} does not accept an alert: {first_line(error)}",
            hint=hint,
        ) from error
