"""`caf init`: the first caf.toml, and files for Celery and Kubernetes."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from caf_pipeline.cli.keys import write_identity
from caf_pipeline.cli.terminal import exclusive, note
from caf_pipeline.cli.wallet import WALLET_FILE, write_wallet
from caf_pipeline.encryption.identities import Identity
from caf_pipeline.errors import UsageError
from caf_pipeline.formats import age
from caf_pipeline.setting_values import (
    BucketName,
    Endpoint,
    KeyPrefix,
    MnemonicFile,
    Recipient,
    SourceName,
)
from caf_pipeline.settings import CONFIG_VARIABLE, DEFAULT_CONFIG, load_settings
from caf_pipeline.settings_errors import check_option
from caf_pipeline.settings_file import first_settings, source_name
from caf_pipeline.system.atomic_files import sync_file, sync_folder
from caf_pipeline.system.package_files import package_file

_IDENTITY_FILE: Final = "identity.txt"
_STORE_FOLDER: Final = ".caf/store"

Store = Literal["directory", "jackal"]


def init(
    *,
    bucket: Annotated[str, typer.Option("--bucket", metavar="NAME", help="The bucket.")] = "",
    prefix: Annotated[
        str,
        typer.Option("--prefix", metavar="PREFIX", help="Archive only its keys."),
    ] = "",
    endpoint_url: Annotated[
        str, typer.Option("--endpoint-url", metavar="URL", help="The S3 server, if not AWS.")
    ] = "",
    source: Annotated[
        str, typer.Option("--source", metavar="NAME", help="Default: from the bucket's name.")
    ] = "",
    store: Annotated[
        Store | None, typer.Option("--store", help="Where chunks are kept; by default asked.")
    ] = None,
    recipient: Annotated[
        list[str] | None,
        typer.Option("--recipient", metavar="KEY", help="Encrypt to this key. Can be repeated."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Do not encrypt: anybody can read every object.")
    ] = False,
    mnemonic_file: Annotated[
        str,
        typer.Option(
            "--mnemonic-file",
            metavar="FILE",
            help="The words of your wallet, for Jackal. By default a wallet is made.",
        ),
    ] = "",
    celery: Annotated[
        bool, typer.Option("--celery", help="Write files for Celery workers to deploy/celery.")
    ] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Write files for pods to deploy/kubernetes.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; needs --bucket.")] = False,
) -> None:
    r"""Write a caf.toml for a bucket, and make its keys.

    caf.toml is written into the working directory. On a terminal, missing values are asked for.
    No key is made with --recipient or --public. Otherwise the identity goes to identity.txt. For
    Jackal, the words of a new wallet go to jackal-wallet. Both have mode 600. Nothing is
    overwritten or bought, and no network is used.

    Only the files of deploy are written if --celery or --kubernetes is given without --bucket.

    \b
    Example:
      caf init --bucket my-photos --store directory --yes

    \b
    Exit status: 8
      0  The files are written.
      2  One of the files exists, a value is missing, or options exclude each other.
      3  A value is wrong.
    """
    path, identity_path = Path(DEFAULT_CONFIG), Path(_IDENTITY_FILE)
    exclusive(public=public, recipient=recipient)
    examples = {"deploy/celery": celery, "deploy/kubernetes": kubernetes}
    folders = [folder for folder, is_wanted in examples.items() if is_wanted]
    for folder in folders:
        if os.path.lexists(folder):
            raise UsageError(f"{folder} exists.", hint="Use its files, or another folder.")
    if folders and not bucket:
        _copy(folders)
        return
    if os.path.lexists(path):
        raise _exists(path)
    asks = not yes and sys.stdin.isatty()
    if not bucket:
        if not asks:
            raise UsageError("the bucket is missing.", hint="Give --bucket NAME.")
        bucket = typer.prompt("Bucket", err=True)
        prefix = prefix or typer.prompt("Prefix", default="", show_default=False, err=True)
        source = source or typer.prompt("Source", default=source_name(bucket), err=True)
    if store is None:
        if not asks:
            raise UsageError("the store is missing.", hint="Give --store directory or jackal.")
        kept = typer.confirm("Keep chunks in a folder of this machine?", err=True)
        store = "directory" if kept else "jackal"
    makes_wallet = store == "jackal" and not mnemonic_file
    if makes_wallet and os.path.lexists(WALLET_FILE):
        raise UsageError(f"{WALLET_FILE} exists.", hint="Give it by --mnemonic-file.")
    identity = None if public or recipient else age.new_identity()
    if identity and os.path.lexists(identity_path):
        raise UsageError(f"{identity_path} exists.", hint="Give its recipient by --recipient.")
    recipients = [str(identity.recipient)] if identity else recipient or []
    source = source or source_name(bucket)
    for option, kind, value in (
        ("--source", SourceName, source),
        ("--bucket", BucketName, bucket),
        ("--prefix", KeyPrefix, prefix),
        ("--endpoint-url", Endpoint, endpoint_url),
        *(("--recipient", Recipient, key) for key in recipients),
        *([("--mnemonic-file", MnemonicFile, mnemonic_file)] if mnemonic_file else []),
    ):
        check_option(option, kind, value)
    text = first_settings(
        source,
        bucket,
        prefix=prefix,
        endpoint_url=endpoint_url,
        store_folder=_STORE_FOLDER if store == "directory" else "",
        recipients=recipients,
        identity_file=_IDENTITY_FILE if identity else "",
        mnemonic_file=WALLET_FILE if makes_wallet else mnemonic_file,
    )
    made, address = _write(path, text, identity, makes_wallet=makes_wallet)
    _copy(folders)
    _say_what_is_next(source, store, made, address)


def _write(
    path: Path, text: str, identity: Identity | None, *, makes_wallet: bool
) -> tuple[Sequence[Path], str]:
    # Returns the files with secrets, and the wallet's address.
    address = ""
    made: list[Path] = []
    unfinished = path.with_suffix(".toml.new")
    try:
        new_file = unfinished.open("x", encoding="utf-8")
    except FileExistsError:
        raise UsageError(
            f"{unfinished} exists.", hint="Remove it if an interrupted caf init left it."
        ) from None
    try:
        with new_file:
            new_file.write(text)
        sync_file(unfinished)
        load_settings(unfinished)
        if identity:
            write_identity(Path(_IDENTITY_FILE), identity)
            made.append(Path(_IDENTITY_FILE))
        if makes_wallet:
            address = write_wallet(Path(WALLET_FILE))
            made.append(Path(WALLET_FILE))
        os.link(unfinished, path)  # unlike a rename, it fails if there is one by now
    except Exception as error:
        for secret in made:  # no caf.toml names it
            secret.unlink()
        if isinstance(error, FileExistsError):
            raise _exists(path) from None
        raise
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)
    return made, address


def _copy(folders: Sequence[str]) -> None:
    for folder in folders:
        shutil.copytree(package_file(folder), folder)
        typer.echo(f"{folder} has files; docs/how-to/{Path(folder).name}.md says what to do")


def _exists(path: Path) -> UsageError:
    return UsageError(f"{path} exists.", hint="Add the source to it, or use another folder.")


def _say_what_is_next(name: str, store: Store, made: Sequence[Path], address: str) -> None:
    typer.echo(f"{DEFAULT_CONFIG} has the source '{name}'")
    for secret in made:
        note(f"keep a copy of {secret} elsewhere: nothing can make it again")
    if os.environ.get(CONFIG_VARIABLE):
        note(f"{CONFIG_VARIABLE} names another file, which commands read instead")
    if address:
        note(f"the wallet's address is {address}")
    if store == "jackal":
        note("first: caf help docs/how-to/connect-jackal.md, for nodes, coins and space")
    note(f"next: caf plan {name}, then caf run {name}; caf ui shows runs in a browser")
