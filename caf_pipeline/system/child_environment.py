"""The environment that a process of ours gives to one that it starts: what a list names, and of the
secrets only its own.

A process inherits its parent's whole environment unless it is given another, and the user that it
runs as can read it for as long as it runs. Postgres has no use for the wallet's words.
"""

import os
from enum import Flag, auto
from functools import reduce
from operator import or_
from typing import Final


class Need(Flag):
    """What a process needs besides paths, language and time zone.

    Attributes:
        NOTHING: a program that knows nothing of this archive, e.g. Postgres.
        SETTINGS: our settings and Dagster's, without those that are secret.
        NETWORK: proxies, whose URLs may hold passwords, and certificates.
        S3: the keys, regions and endpoints of AWS's tools, and the sources' own keys.
        WALLET: the wallet's words.
        LEDGER: the ledger's URL.
        STORAGE: the URL of Dagster's own storage.
        POSTGRES: what libpq reads, its password with it; for either of the two.
        ALERTS: where alerts are sent, with what that takes.
    """

    NOTHING = 0
    SETTINGS = auto()
    NETWORK = auto()
    S3 = auto()
    WALLET = auto()
    LEDGER = auto()
    STORAGE = auto()
    POSTGRES = auto()
    ALERTS = auto()


_PLAIN: Final = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TZDIR TMPDIR TEMP TMP TERM COLORTERM COLUMNS LINES NO_COLOR FORCE_COLOR
    VIRTUAL_ENV XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR
"""  # noqa: E501
_NETWORK: Final = (
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE"
)
_NAMES: Final = dict.fromkeys(_PLAIN.split(), Need.NOTHING) | dict.fromkeys(
    _NETWORK.split(), Need.NETWORK
)
_NAMES["JACKAL_MNEMONIC"] = Need.WALLET

_PREFIXES: Final = {
    **dict.fromkeys(
        ("LC_", "LD_", "DYLD_", "PYTHON"), Need.NOTHING
    ),  # libraries and Python may be in unusual places
    "AWS_": Need.S3,
    "GRPC_": Need.NOTHING,  # how much Dagster's servers say
    "PG": Need.POSTGRES,
    "DAGSTER_": Need.SETTINGS,
}
_SECRETS: Final = {
    "caf_database_url": Need.LEDGER,
    "caf_dagster_database_url": Need.STORAGE,
    "access_key_id": Need.S3,
    "secret_access_key": Need.S3,
    "mnemonic": Need.WALLET,
    "webhook": Need.ALERTS,
    "smtp_password": Need.ALERTS,
}
"""Of our own settings, by how their names end."""


def child_environment(needs: Need = Need.NOTHING) -> dict[str, str]:
    """Return the variables of this process's environment that a child needs; one that no list names
    is never among them.
    """
    needed = {name: _need_of(name, value) for name, value in os.environ.items()}
    return {
        name: os.environ[name]
        for name, need in needed.items()
        if need is not None and need in needs
    }


def _need_of(name: str, value: str) -> Need | None:
    if name.upper().startswith("CAF_"):
        # The end of a name tells, which is read in either case; and a whole section may be given as
        # JSON, its secrets with it.
        held = [
            need
            for secret, need in _SECRETS.items()
            if name.lower().endswith(secret) or f'"{secret}"' in value
        ]
        return reduce(or_, held) if held else Need.SETTINGS
    upper = (
        name.upper() if name.lower().endswith("_proxy") else name
    )  # proxies are read in either case
    return _NAMES.get(
        upper, next((need for prefix, need in _PREFIXES.items() if name.startswith(prefix)), None)
    )
