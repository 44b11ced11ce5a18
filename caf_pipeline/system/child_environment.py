"""The environment of child processes, with only the secrets that a child needs.

By default a child inherits its parent's whole environment, which its user can read.
"""

import os
from enum import Flag, auto
from functools import reduce
from operator import or_
from typing import Final


class Need(Flag):
    """What a process needs besides paths, language and time zone.

    Attributes:
        NOTHING: Programs that know nothing about this archive, e.g. Postgres.
        SETTINGS: Our settings and Dagster's, without secrets.
        NETWORK: Certificates, and proxies, whose URLs may contain passwords.
        S3: Keys, regions and endpoints of AWS's tools, and the sources' keys.
        IDENTITY: The identity that decrypts chunks, and the passphrase of its file.
        WORKER_KEY: The key of the journals of private chunks.
        STORAGE: The URL of Dagster's storage.
        POSTGRES: Variables of libpq with its password.
        ALERTS: Where alerts are sent, with credentials.
    """

    NOTHING = 0
    SETTINGS = auto()
    NETWORK = auto()
    S3 = auto()
    WALLET = auto()
    IDENTITY = auto()
    WORKER_KEY = auto()
    LEDGER = auto()
    STORAGE = auto()
    POSTGRES = auto()
    ALERTS = auto()


_PLAIN: Final = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TZDIR TMPDIR TEMP TMP TERM COLORTERM COLUMNS LINES
    NO_COLOR FORCE_COLOR VIRTUAL_ENV XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR
"""
_NETWORK: Final = (
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE"
)
_NAMES: Final = dict.fromkeys(_PLAIN.split(), Need.NOTHING) | dict.fromkeys(
    _NETWORK.split(), Need.NETWORK
)
_NAMES["JACKAL_MNEMONIC"] = Need.WALLET

_PREFIXES: Final = {
    # Libraries and Python may be in unusual places.
    **dict.fromkeys(("LC_", "LD_", "DYLD_", "PYTHON"), Need.NOTHING),
    "AWS_": Need.S3,
    "GRPC_": Need.NOTHING,  # verbosity of Dagster's servers
    "PG": Need.POSTGRES,
    "DAGSTER_": Need.SETTINGS,
}
_SECRETS: Final = {
    "caf_database_url": Need.LEDGER,
    "caf_dagster_database_url": Need.STORAGE,
    "access_key_id": Need.S3,
    "secret_access_key": Need.S3,
    "mnemonic": Need.WALLET,
    "identity": Need.IDENTITY,
    "caf_passphrase": Need.IDENTITY,
    "worker_key": Need.WORKER_KEY,
    "webhook": Need.ALERTS,
    "smtp_password": Need.ALERTS,
}
"""Our own secret settings, by the ends of their names."""


def child_environment(needs: Need = Need.NOTHING) -> dict[str, str]:
    """Return only the variables that a child needs."""
    needed = {name: _need_of(name, value) for name, value in os.environ.items()}
    return {
        name: os.environ[name]
        for name, need in needed.items()
        if need is not None and need in needs
    }


def _need_of(name: str, value: str) -> Need | None:
    if name.upper().startswith("CAF_"):
        # Names are case-insensitive. A variable may contain a whole section with secrets as JSON.
        needs = [
            need
            for secret, need in _SECRETS.items()
            if name.lower().endswith(secret) or f'"{secret}"' in value
        ]
        return reduce(or_, needs) if needs else Need.SETTINGS
    # Names of proxies are case-insensitive.
    key = name.upper() if name.lower().endswith("_proxy") else name
    return _NAMES.get(
        key, next((need for prefix, need in _PREFIXES.items() if name.startswith(prefix)), None)
    )
