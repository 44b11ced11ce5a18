"""The command line `caf`: its entry point, and how an error ends a process.

No traceback reaches a user: every failure is one sentence on stderr, a hint where there is one, and an exit status.
Importing this package loads nothing heavy; the commands are in `app`.
"""

import errno
import os
import sys
from collections.abc import Sequence
from typing import Final

from caf_pipeline.errors import CafError, StagingError

INTERRUPTED: Final = 130  # 128 + SIGINT, as shells count
BROKEN_PIPE: Final = 141  # 128 + SIGPIPE
TRACEBACK_VARIABLE: Final = "CAF_TRACEBACK"
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; the arguments are the process's own where none are given."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a key may hold what the terminal's encoding lacks
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("caf: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left. What Python still holds back must not fail a second time at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(arguments: Sequence[str] | None) -> int:  # noqa: PLR0911 - one for each way to end
    from typer import Abort  # noqa: PLC0415  loading typer takes longer than most of what uses this package
    from typer.exceptions import TyperException  # noqa: PLC0415

    from caf_pipeline.cli.app import command  # noqa: PLC0415

    try:
        status = command().main(args=arguments, prog_name="caf", standalone_mode=False)
        sys.stdout.flush()
    except CafError as error:
        return _fail(str(error), error.hint, error.exit_code)
    except TyperException as error:
        return _fail(error.format_message(), "`caf --help` and `caf COMMAND --help` say how.", error.exit_code)
    except Abort:
        return INTERRUPTED
    except SystemExit as error:  # typer's own answer to a reader that left
        raise error.__context__ or error from None
    except BrokenPipeError:
        raise
    except OSError as error:
        status = StagingError.exit_code if error.errno in _NO_SPACE else CafError.exit_code
        return _fail(sentence(error), "", status)
    except MemoryError:
        return _fail("There is not enough memory.", "", CafError.exit_code)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        return _fail(
            f"This should not have happened: {type(error).__name__}: {error}",
            f"It is a bug; report it with what {TRACEBACK_VARIABLE}=1 prints.",
            CafError.exit_code,
        )
    return status if isinstance(status, int) else 0


def sentence(error: OSError) -> str:
    """Say what the system refused, and on which path."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename!r}: {reason}." if error.filename else f"{reason}."


def _fail(message: str, hint: str, status: int) -> int:
    print(f"caf: error: {_shown(message)}", file=sys.stderr)
    if hint:
        print(f"     hint: {_shown(hint)}", file=sys.stderr)
    return status


def _shown(text: str) -> str:
    """Return text that cannot move the cursor or begin a line of its own: a server's words may be part of it."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
