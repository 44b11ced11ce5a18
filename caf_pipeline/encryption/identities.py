"""Recipients and identities as the settings configure them."""

import os
import select
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from caf_pipeline.errors import (
    ArchiveError,
    IdentityMissing,
    KeyRefused,
    NoMatchingIdentity,
    NotPublic,
)
from caf_pipeline.formats import age
from caf_pipeline.settings import PASSPHRASE_VARIABLE, EncryptionSettings, Settings
from caf_pipeline.system.secret_files import MAX_SECRET_BYTES, read_secret

IDENTITY_VARIABLE: Final = "CAF_ENCRYPTION__IDENTITY"

SINGLE_RECIPIENT: Final = "it has one recipient: whoever loses its identity loses the archive"
SECOND_KEY: Final = "'caf keys new --recovery' makes a second key"

COMMAND_SECONDS: Final = 60
"""Time limit of `identity_command`. A locked secret manager would wait for its user forever."""

Identity = age.X25519Identity | age.HybridIdentity


# --- recipients


def require_recipients(settings: Settings, source: str) -> tuple[age.Recipient, ...]:
    """Return the recipients of a source's new chunks. Empty if the source is public.

    Raises:
        NotPublic: The source is not public and has no recipients.
        SettingsError: The source does not exist.
    """
    texts = settings.recipients_of(source)
    if not texts and not settings.source(source).public:
        raise NotPublic(
            f"source '{source}' has no recipients to encrypt to, and is not public",
            hint="'caf keys new' makes a key; set 'public = true' only if anybody may read the "
            "source's objects",
        )
    return tuple(age.parse_recipient(text) for text in texts)


def has_single_recipient(settings: Settings, source: str) -> bool:
    """Return whether one lost identity would lose the source's new chunks.

    Raises SettingsError if the source does not exist.
    """
    return len(set(settings.recipients_of(source))) == 1


# --- identities


class Identities:
    """The identities of this process, loaded once at first use. Thread-safe."""

    def __init__(
        self, settings: EncryptionSettings, ask_passphrase: Callable[[], str] | None = None
    ) -> None:
        """Load nothing yet.

        `ask_passphrase` is called if the identity needs a passphrase and CAF_PASSPHRASE is not set.
        """
        self._settings = settings
        self._ask_passphrase = ask_passphrase
        self._lock = threading.Lock()
        self._identities: tuple[Identity, ...] = ()

    def get(self) -> Sequence[Identity]:
        """Return at least one identity.

        Raises:
            IdentityMissing: None is configured.
            KeyRefused: The identities cannot be read. The message has no secret.
        """
        with self._lock:
            self._identities = self._identities or self._load()
            return self._identities

    def _load(self) -> tuple[Identity, ...]:
        settings = self._settings
        if settings.identity:
            return parse_identities(
                settings.identity.get_secret_value().encode(), IDENTITY_VARIABLE, self._passphrase
            )
        if settings.identity_file:
            path = settings.identity_file
            data = read_secret(path, KeyRefused, hint="encryption.identity_file names this file")
            return parse_identities(data, str(path), self._passphrase)
        if settings.identity_command:
            output = _run(settings.identity_command)
            return parse_identities(output, "the output of identity_command", self._passphrase)
        raise IdentityMissing(
            "no identity is configured to decrypt with",
            hint="set encryption.identity_file, encryption.identity_command or "
            f"{IDENTITY_VARIABLE} to the identity of a recipient",
        )

    def _passphrase(self) -> str:
        if passphrase := os.environ.get(PASSPHRASE_VARIABLE):
            return passphrase
        if self._ask_passphrase is None:
            raise KeyRefused(
                "the identity needs a passphrase", hint=f"set {PASSPHRASE_VARIABLE} to it"
            )
        return self._ask_passphrase()


def parse_identities(
    data: bytes, origin: str, passphrase: Callable[[], str]
) -> tuple[Identity, ...]:
    """Return the identities of an identity file, which may be encrypted to a passphrase.

    `origin` names the file in errors. `passphrase` is called if it is needed. Raises KeyRefused.
    """
    if age.is_age_file(data):
        data = _decrypt(data, origin, passphrase)
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise KeyRefused(
            f"{origin} is not an identity file: it is not text in UTF-8",
            hint="some shells of Windows write UTF-16; save the file as UTF-8",
        ) from None
    identities = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            try:
                identities.append(age.parse_identity(line))
            except KeyRefused as error:
                raise KeyRefused(f"{origin}, line {number}: {error}", hint=error.hint) from None
    if not identities:
        raise KeyRefused(f"{origin} has no identity", hint="'caf keys new' makes an identity file")
    return tuple(identities)


def _decrypt(data: bytes, origin: str, passphrase: Callable[[], str]) -> bytes:
    try:
        header = age.parse_header(data)
        if header.stanzas[0].arguments[0] != "scrypt":
            raise KeyRefused(
                f"{origin} is encrypted to a recipient", hint="encrypt it to a passphrase instead"
            )
        payload, start_byte = age.open_file(data, [age.Passphrase(passphrase())])
        return bytes(payload.open(0, data[start_byte:], is_end=True))
    except NoMatchingIdentity:
        raise KeyRefused(f"{origin} cannot be decrypted: the passphrase is wrong") from None
    except ArchiveError as error:
        raise KeyRefused(f"{origin} cannot be decrypted: {error}", hint=error.hint) from None


def _run(command: str) -> bytes:
    # A secret manager needs variables of its own, but none of our secrets.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(("CAF_", "JACKAL_"))
    }
    try:
        process = subprocess.Popen(
            shlex.split(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        raise KeyRefused(f"identity_command cannot be started: {error.strerror}") from None
    with process:
        try:
            output = _output_of(process)
        except subprocess.TimeoutExpired:
            raise KeyRefused(f"identity_command did not end within {COMMAND_SECONDS} s") from None
        finally:
            process.kill()
    if len(output) > MAX_SECRET_BYTES:
        raise KeyRefused(f"identity_command wrote more than {MAX_SECRET_BYTES} bytes")
    if process.returncode:
        raise KeyRefused(
            f"identity_command failed with exit status {process.returncode}",
            hint="run the command of encryption.identity_command in a terminal to see why",
        )
    return output


def _output_of(process: "subprocess.Popen[bytes]") -> bytes:
    """Return the output of a process that has ended, or more than may be read."""
    assert process.stdout
    deadline, output = time.monotonic() + COMMAND_SECONDS, b""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while len(output) <= MAX_SECRET_BYTES:
        if not poll.poll(max(0, deadline - time.monotonic()) * 1000):
            raise subprocess.TimeoutExpired(process.args, COMMAND_SECONDS)
        piece = os.read(process.stdout.fileno(), MAX_SECRET_BYTES)
        if not piece:
            process.wait(max(0, deadline - time.monotonic()))
            break
        output += piece
    return output


def encrypt_identity(text: str, passphrase: str) -> bytes:
    """Return an identity file that is encrypted to a passphrase."""
    file_key, nonce = os.urandom(age.FILE_KEY_BYTES), os.urandom(age.NONCE_BYTES)
    header = age.make_header([age.Passphrase(passphrase)], file_key)
    return header + nonce + age.Payload(file_key, nonce).seal(0, text.encode(), is_end=True)
