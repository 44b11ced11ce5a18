"""Sends a message to people: as JSON to a webhook, as e-mail to an SMTP server.

Each is one attempt, with an end.
"""

import logging
import smtplib
import ssl
from collections.abc import Mapping, Sequence
from email.message import EmailMessage
from typing import Any
from urllib.parse import urlsplit

import httpx

from caf_pipeline.errors import AlertNotSent, first_line

# httpx writes the URL of each request at the level INFO, and that of a webhook is a secret.
logging.getLogger("httpx").setLevel(logging.WARNING)


def post_json(url: str, body: Mapping[str, Any], *, seconds: float) -> None:
    """Post a JSON object; each wait for bytes is `seconds` at most.

    The URL's path may be a secret, and is in no error.

    Raises:
        AlertNotSent: it was not answered with a status from 200 to 299.
    """
    where = f"the webhook at {urlsplit(url).hostname}"
    try:
        status = httpx.post(url, json=dict(body), timeout=seconds).status_code
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise AlertNotSent(
            f"{where} gives no answer: {_without(url, error)}", hint="check CAF_ALERTS__WEBHOOK"
        ) from None
    if not httpx.codes.is_success(status):
        raise AlertNotSent(
            f"{where} answers with HTTP status {status}", hint="check CAF_ALERTS__WEBHOOK"
        )


def _without(url: str, error: Exception) -> str:
    """Return what an error says where it does not quote the URL, else its name."""
    said = first_line(error)
    return type(error).__name__ if url in said or urlsplit(url).path.strip("/") in said else said


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
    """Send an e-mail by an SMTP server; each wait for bytes is `seconds` at most.

    Returns the recipients that it refused.

    Args:
        subject: of the e-mail.
        text: likewise.
        sender: its address.
        to: theirs.
        host: of the server.
        port: likewise.
        security: `starttls`, `tls` or `none`.
        login: user and password.
        seconds: see above.

    Raises:
        AlertNotSent: the server did not take it for any recipient.
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
    except smtplib.SMTPAuthenticationError:  # what it says may have the password in it
        raise AlertNotSent(
            f"the mail server {host}:{port} refuses the login", hint="check alerts.smtp_user"
        ) from None
    except UnicodeError:  # it quotes what it cannot write
        hint = "write alerts.smtp_user, CAF_ALERTS__SMTP_PASSWORD and the addresses in ASCII"
        raise AlertNotSent(
            f"the mail server {host}:{port} cannot be given the login or an address", hint=hint
        ) from None
    except (smtplib.SMTPException, OSError) as error:
        raise AlertNotSent(
            f"the mail server {host}:{port} does not take an alert: {first_line(error)}", hint=hint
        ) from error
