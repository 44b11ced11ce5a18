"""`caf keys`: the keys of sources that are not public."""

import os
import secrets
from collections.abc import Set
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from caf_pipeline.cli.opening import opened_lookup, opened_reader
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourceArgument,
    ask_passphrase,
    counted,
    note,
    output_option,
    print_json,
)
from caf_pipeline.encryption.identities import Identities, Identity, encrypt_identity
from caf_pipeline.errors import CafError, IdentityMissing, IntegrityError, UsageError
from caf_pipeline.formats import age
from caf_pipeline.retrieval.key_check import check_keys
from caf_pipeline.settings import PASSPHRASE_VARIABLE, Settings, load_settings
from caf_pipeline.system.secret_files import write_secret


def new(
    out: Annotated[
        Path | None, output_option("Write the identity to FILE instead. It must not exist.")
    ] = None,
    classic: Annotated[
        bool,
        typer.Option(
            "--classic",
            help="Make an X25519 key, for age before 1.3. A quantum computer will break it.",
        ),
    ] = False,
    recovery: Annotated[
        bool, typer.Option("--recovery", help="Make the second key, which you keep offline.")
    ] = False,
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="Encrypt the identity to a passphrase.")
    ] = False,
) -> None:
    r"""Make a key: an identity, and its recipient.

    The identity is the secret. It goes to a new file of mode 600: identity.txt beside caf.toml, or
    recovery-identity.txt with --recovery. Standard output has the recipient alone, which is public.
    The age tool reads the file, too. See docs/how-to/encryption.md.

    --passphrase uses CAF_PASSPHRASE, or asks on the terminal.

    \b
    Examples:
      caf keys new
      caf keys new --recovery -o /media/usb/recovery.txt --passphrase

    \b
    Exit status: 8
      0  The identity is written.
      1  The folder does not exist, or cannot be written.
      2  The file exists, or there is no terminal to ask for the passphrase.
      3  There is no caf.toml, or it is wrong. Not with -o.
    """
    path = out or load_settings().folder / ("recovery-identity.txt" if recovery else "identity.txt")
    if os.path.lexists(path):
        raise _exists(path)
    words = ""
    if passphrase:
        words = os.environ.get(PASSPHRASE_VARIABLE) or ask_passphrase(is_new=True)
    identity = age.new_identity(hybrid=not classic)
    write_identity(path, identity, words if passphrase else None)
    typer.echo(str(identity.recipient))
    note(f"the identity is in {path}")
    if recovery:
        note("add the printed recipient to encryption.recipients in caf.toml")
        note("keep this file offline, not on this machine: copy it to a safe place, then delete it")
        return
    note("write into caf.toml on every machine:")
    note("  [encryption]")
    note(f'  recipients = ["{identity.recipient}"]')
    note("and on machines that read, to which you copy the identity:")
    note(f'  identity_file = "{path.name if out is None else path.absolute()}"')


def write_identity(path: Path, identity: Identity, passphrase: str | None = None) -> None:
    """Write a new identity file of mode 600. Raises UsageError if the path exists."""
    text = (
        f"# created: {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\n"
        f"# public key: {identity.recipient}\n"
        f"{identity.reveal()}\n"
    )
    secret = text.encode() if passphrase is None else encrypt_identity(text, passphrase)
    try:
        write_secret(path, secret)
    except FileExistsError:
        raise _exists(path) from None


def _exists(path: Path) -> UsageError:
    return UsageError(
        f"{path} exists, and an identity is never overwritten.", hint="Name another file with -o."
    )


def show(
    json: JsonOption = False,
) -> None:
    r"""Show the recipients of each source, and whether this process has an identity of them.

    Shows the recipients that new chunks get, and those of this process's identities. An uploaded
    chunk keeps its recipients. Identities are not shown. --json shows recipients in full.

    \b
    Example:
      caf keys show --json | jq -r '.identities[]'   # the recipients of this process's identities

    \b
    Exit status:
      0  Success, even without an identity.
      3  Wrong settings, or the identity cannot be read.
    """
    settings = load_settings()
    local_recipients = _own_recipients(settings)
    if json:
        sources = [
            {
                "source": name,
                "public": source.public,
                "recipients": settings.recipients_of(name),
                "can_read": source.public
                or bool(local_recipients & set(settings.recipients_of(name))),
            }
            for name, source in sorted(settings.sources.items())
        ]
        print_json(sources=sources, identities=sorted(local_recipients))
        return
    for name in sorted(settings.sources):
        typer.echo(f"{name}: {_summary(settings, name, local_recipients)}")
        for recipient in settings.recipients_of(name):
            typer.echo(
                f"  {age.shortened(recipient)}{'  identity here' * (recipient in local_recipients)}"
            )
    typer.echo(
        "this process has no identity" if not local_recipients else "identities of this process:"
    )
    for recipient in sorted(local_recipients):
        typer.echo(f"  {age.shortened(recipient)}")


def _own_recipients(settings: Settings) -> Set[str]:
    try:
        identities = Identities(settings.encryption, ask_passphrase).get()
    except IdentityMissing:
        return frozenset()
    return {str(identity.recipient) for identity in identities}


def _summary(settings: Settings, source: str, local_recipients: Set[str]) -> str:
    if settings.source(source).public:
        return "public, so anybody can read it"
    recipients = settings.recipients_of(source)
    if not recipients:
        return "neither public nor encrypted, so its runs are refused; caf keys new makes a key"
    can = "can" if local_recipients & set(recipients) else "cannot"
    return f"encrypted; this process {can} read new chunks"


def check(source: SourceArgument) -> None:
    r"""Check whether this process's identities open every chunk of a source.

    Reads the header of each stored chunk, and compares it with the ledger's. Nothing else is read:
    'caf safe-to-delete' opens whole chunks.

    \b
    Exit status: 6
      0   The identities open every chunk.
      1   They do not open some chunks, which are listed, but headers are right.
      3   Wrong settings or source, or there is no identity.
      7   A chunk cannot be read now.
      9   A header is foreign, damaged or not stored: no other identity helps.
      11  Nothing of the source is archived yet.
    """
    settings = load_settings()
    identities = Identities(settings.encryption, ask_passphrase).get()
    opened_count = identity_count = header_count = 0
    with opened_lookup(settings) as lookup, opened_reader(settings, lookup, source) as reader:
        for result in check_keys(lookup, reader.stored, identities, source):
            problems = list(filter(None, (result.header_problem, result.identity_problem)))
            opened_count += not problems
            identity_count += bool(result.identity_problem)
            header_count += bool(result.header_problem)
            if problems:
                typer.echo(f"{result.chunk}: {'; '.join(problems)}")
    note(f"{source}: {counted(opened_count, 'encrypted chunk')} can be opened")
    if header_count:
        raise IntegrityError(
            f"{counted(header_count, 'chunk')} of '{source}' without the header of the seal: "
            "another identity does not help",
            hint=f"compare the copies by 'caf prove {source}'; restore a wrong header in the "
            "ledger from a backup",
        )
    if identity_count:
        raise CafError(
            f"these identities do not open {counted(identity_count, 'chunk')} of '{source}'",
            hint="use the identity of a recipient that the chunks were encrypted to",
        )


def worker() -> None:
    r"""Print a new worker key.

    Set it as CAF_WORKER_KEY where chunks are packed. It encrypts the journals of private chunks, so
    that a killed run resumes. If no key is set, such a chunk starts again. The key opens no chunk
    that was sealed.

    \b
    Example:
      export CAF_WORKER_KEY=$(caf keys worker)

    \b
    Exit status: 0
    """
    typer.echo(secrets.token_hex(32))
