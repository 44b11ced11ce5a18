"""`caf version`, `caf help` and `caf completion`: about the command line itself."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
import typer.main
from typer.completion import completion_init, shell_complete  # type: ignore[attr-defined]

from caf_pipeline.cli import COMPLETE_VARIABLE
from caf_pipeline.errors import SettingsError, UsageError
from caf_pipeline.system.package_files import package_file

_LINE_VARIABLES: Final = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # of bash, and of other shells


def version() -> None:
    r"""Print the version, as --version does.

    \b
    Exit status: 0
    """
    from importlib.metadata import version  # noqa: PLC0415  slower than most commands

    typer.echo(f"caf {version('caf-pipeline')}")


def show_help(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND... | PAGE]", help="All commands by default."),
    ] = None,
) -> None:
    r"""Print the help of a command, or a page of the docs.

    The help of a command is what COMMAND --help prints. PAGE is a path such as
    docs/how-to/restore.md, which help and errors name. `docs` is the list of all pages.

    \b
    Examples:
      caf help jackal buy
      caf help docs/how-to/connect-jackal.md | less

    \b
    Exit status: 0
      2  No such command or page.
    """
    if words and (words[0] == "docs" or words[0].startswith("docs/")):
        typer.echo(_page(words[0]), nl=False)
        return
    from caf_pipeline.cli.app import build  # noqa: PLC0415  it loads this module by name

    words = words or []
    typer.main.get_command(build(words[0] if words else "")).main(
        args=[*words, "--help"], prog_name="caf", standalone_mode=False
    )


def _page(name: str) -> str:
    path = Path("docs/index.md" if name in ("docs", "docs/") else name.partition("#")[0])
    if path.suffix == ".md" and ".." not in path.parts:
        with suppress(SettingsError):
            return package_file(str(path)).read_text(encoding="utf-8")
    raise UsageError(f"there is no page {name!r}.", hint="caf help docs lists the pages.")


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")
    ],
) -> None:
    r"""Print the script that lets a shell complete `caf`.

    \b
    Examples:
      source <(caf completion bash)
      caf completion fish > ~/.config/fish/completions/caf.fish

    \b
    Exit status: 0
      2  SHELL is none of the three.
    """
    from caf_pipeline.cli.app import build  # noqa: PLC0415  it loads this module by name

    completion_init()
    command = typer.main.get_command(build(""))
    shell_complete(command, {}, "caf", COMPLETE_VARIABLE, f"source_{shell}")


def words_to_complete() -> list[str]:
    """Return the words of the command line that a shell completes, without `caf`."""
    completion_init()
    line = next(filter(None, map(os.environ.get, _LINE_VARIABLES)), "")
    return line.split()[1:]
