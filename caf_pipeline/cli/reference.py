"""Generates docs/reference/cli.md from the help of the commands.

Usage: `python -m caf_pipeline.cli.reference FILE`. A test compares both.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from typer import Typer
from typer.testing import CliRunner

from caf_pipeline.cli.app import build
from caf_pipeline.errors import exit_texts

WIDTH: Final = "100"  # columns of the help texts, on any terminal

_OPENING: Final = """\
# The command line

Generated from the help of the commands by `make docs`. Errors are one sentence on standard error, a
hint, and an exit status:

| status | meaning |
|---:|---|
"""

_OUTCOMES: Final = {
    0: "Success.",
    12: "Chunks failed.",
    13: "Other runs hold the missing chunks.",
    14: "Objects must be tried again.",
    15: "Objects wait for more.",
    18: "Chunks are damaged.",
    19: "The inventory lists no object.",
    129: "SIGHUP or a closed terminal.",
    130: "Interrupted by Ctrl-C.",
    141: "The reader of the output left.",
    143: "SIGTERM.",
}
"""Statuses of no error class."""


def _commands(app: Typer) -> Iterator[list[str]]:
    for command in app.registered_commands:
        yield [command.name or ""]
    for group in app.registered_groups:
        yield [group.name or ""]
        if group.typer_instance:
            yield from ([group.name or "", *words] for words in _commands(group.typer_instance))


def reference() -> str:
    """Return the text of docs/reference/cli.md."""
    app = build()
    runner = CliRunner(env={"COLUMNS": WIDTH, "TERMINAL_WIDTH": WIDTH, "NO_COLOR": "1"})
    texts = sorted((_OUTCOMES | exit_texts()).items())
    parts = [_OPENING + "".join(f"| {status} | {text} |\n" for status, text in texts)]
    for words in [[], *_commands(app)]:
        result = runner.invoke(app, [*words, "--help"], prog_name="caf")
        if result.exit_code:
            raise SystemExit(f"caf {' '.join(words)} --help failed: {result.output}")
        title = " ".join(["caf", *words])
        lines = "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())
        parts.append(f"## {title}\n\n```text\n{lines}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
