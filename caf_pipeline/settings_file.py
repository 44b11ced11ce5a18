"""Writes `caf.toml`: a new file, or one source more. `settings` reads it."""

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from caf_pipeline.errors import SettingsError
from caf_pipeline.setting_values import MAX_SOURCE_NAME
from caf_pipeline.system.atomic_files import WholeFile

_HEAD: Final = """\
# What caf-pipeline archives, and where. `caf help docs/reference/settings.md` lists every setting.
# Secrets come from the environment, never from this file: S3 keys, the wallet's words, passwords.

[store]
"""

_JACKAL: Final = """\
# `caf help docs/how-to/connect-jackal.md` has the steps. "directory" keeps chunks in `folder`.
kind = "jackal"
"""

_SOURCE: Final = """
[sources.{name}]
bucket = {bucket}
"""

_NO_KEY: Final = """\
# Chunks are encrypted to `recipients`: `caf keys new` makes a key. If anybody may read every
# object, set `public = true` instead.
"""

_ENCRYPTION: Final = """
# New chunks are encrypted to these keys. `caf keys new --recovery` makes another one.
[encryption]
recipients = [{recipients}]
"""

_IDENTITY: Final = """\
identity_file = {identity_file}  # the secret that decrypts; only machines that read need it
"""

_WALLET: Final = """
# The wallet pays and signs. `lcd` and `chain_id` name the network.
[jackal]
mnemonic_file = {mnemonic_file}  # the wallet's words; only the machine that archives needs them
"""


def source_name(bucket: str) -> str:
    """Return a name for the source of a bucket."""
    name = re.sub(r"[^a-z0-9]+", "-", bucket.rpartition("/")[2].rpartition(":")[2].lower())
    return name.strip("-")[:MAX_SOURCE_NAME].strip("-") or "bucket"


def add_source(path: Path, name: str, bucket: str, *, store_folder: str = "") -> bool:
    """Add a source; return whether it was new. Existing text stays.

    `store_folder` keeps chunks in a folder instead of on Jackal, in a new file.

    Raises:
        SettingsError: The file has a source of this name, another store, or no room for a table.
    """
    source = _SOURCE.format(name=name, bucket=_quoted(bucket)) + _NO_KEY
    try:
        text = path.read_bytes().decode("utf-8-sig")
        before = tomllib.loads(text)
    except FileNotFoundError:
        _write(path, _HEAD + _store(store_folder) + source)
        return True
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    existing = before.get("sources", {}).get(name)
    if existing and existing.get("bucket") != bucket:
        raise SettingsError(
            f"{path} has a source '{name}' with the bucket '{existing.get('bucket')}'",
            hint="give the new source another name",
        )
    if store_folder and before.get("store", {}).get("folder") != store_folder:
        raise SettingsError(
            f"{path} exists, and its store is not the folder '{store_folder}'",
            hint="leave the folder out, since all sources have one store",
        )
    if existing:
        return False
    added = f"{text.rstrip()}\n{source}" if text.strip() else source.lstrip()
    try:
        tomllib.loads(added)
    except tomllib.TOMLDecodeError as error:  # e.g. after `sources = {}`
        raise SettingsError(
            f"a source cannot be added at the end of {path}: {error}",
            hint=f"add the source '{name}' with bucket = {_quoted(bucket)} by hand",
        ) from error
    _write(path, added)
    return True


def first_settings(
    name: str,
    bucket: str,
    *,
    prefix: str = "",
    endpoint_url: str = "",
    store_folder: str = "",
    recipients: Sequence[str] = (),
    identity_file: str = "",
    mnemonic_file: str = "",
) -> str:
    """Return the text of a caf.toml with one source, which is public if it has no recipients."""
    source = _SOURCE.format(name=name, bucket=_quoted(bucket))
    if prefix:
        source += f"prefix = {_quoted(prefix)}  # only keys that begin with it\n"
    if endpoint_url:
        source += f"endpoint_url = {_quoted(endpoint_url)}\n"
    encryption = ""
    if recipients:
        encryption = _ENCRYPTION.format(recipients=", ".join(map(_quoted, recipients)))
        if identity_file:
            encryption += _IDENTITY.format(identity_file=_quoted(identity_file))
    else:
        source += "public = true  # chunks are not encrypted: anybody can read every object\n"
    wallet = _WALLET.format(mnemonic_file=_quoted(mnemonic_file)) if mnemonic_file else ""
    return _HEAD + _store(store_folder) + source + encryption + wallet


def _store(folder: str) -> str:
    return f'kind = "directory"\nfolder = {_quoted(folder)}\n' if folder else _JACKAL


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _write(path: Path, text: str) -> None:
    try:
        with WholeFile(path.resolve()) as whole:
            whole.file.write(text.encode())
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error
