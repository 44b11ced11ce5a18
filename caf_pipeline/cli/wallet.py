"""`caf jackal wallet new`: a new wallet."""

from pathlib import Path
from typing import Annotated, Final

import typer
from mnemonic import Mnemonic

from caf_pipeline.cli.terminal import note, output_option
from caf_pipeline.errors import UsageError
from caf_pipeline.settings import load_settings
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline.system.secret_files import write_secret

WALLET_FILE: Final = "jackal-wallet"

_ENTROPY_BITS: Final = 256  # 24 words


def new(
    out: Annotated[
        Path | None, output_option("Write the words to FILE instead. It must not exist.")
    ] = None,
) -> None:
    r"""Make a wallet, and print its address.

    The words are the secret: whoever has them has its coins. They go to a new file of mode 600,
    jackal-wallet beside caf.toml, and nowhere else. Nothing is bought, and no network is used.

    \b
    Exit status: 8
      0  The words are written.
      1  The folder does not exist, or cannot be written.
      2  The file exists.
      3  There is no caf.toml, or it is wrong. Not with -o.
    """
    path = out or load_settings().folder / WALLET_FILE
    typer.echo(write_wallet(path))
    note(f"the words are in {path}: keep a copy of them elsewhere")
    note("write into caf.toml on the machine that archives:")
    note("  [jackal]")
    note(f'  mnemonic_file = "{path.name if out is None else path.absolute()}"')
    note("next: send coins to the address; 'caf jackal wallet' shows them")


def write_wallet(path: Path) -> str:
    """Write the words of a new wallet to a new file of mode 600, and return its address.

    Raises:
        UsageError: The path exists.
    """
    words = Mnemonic("english").generate(_ENTROPY_BITS)
    address = Wallet(words).address
    try:
        write_secret(path, f"{words}\n".encode())
    except FileExistsError:
        raise UsageError(
            f"{path} exists.",
            hint="Keep it, since its words may be the only access to an account.",
        ) from None
    return address
