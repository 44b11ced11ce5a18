"""The command line `caf`: its entry point, and how an error ends a process.

No traceback reaches a user: every failure is one sentence on stderr, a hint where there is one, and
an exit status. Importing this package loads nothing heavy; the commands are in `app`. Commands that
need Dagster are in `dagster_host` and are found by an entry point; what a command does is in
`steps`, `retrieval` or `maintenance`, and here is what it reads and prints.
"""

import atexit
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Final

from caf_pipeline.errors import INTERRUPTED, CafError, StagingError, interrupt_behind, one_line
from caf_pipeline.system.ending import interrupted_status

BROKEN_PIPE: Final = 141  # 128 + SIGPIPE
TRACEBACK_VARIABLE: Final = "CAF_TRACEBACK"
_GO_ON: Final = (
    ("run",),
    ("backfill",),
    ("rebuild",),
    ("adopt",),
    ("restore",),
    ("prove",),
    ("repair",),
    ("remove",),
)
"""Commands that keep what they have done, and go on with the rest."""

_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; the arguments are the process's own where none
    are given.
    """
    _stand_in_for_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a key may hold what the terminal's encoding lacks
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(arguments, words)
    except KeyboardInterrupt:
        own = arguments is None and threading.current_thread() is threading.main_thread()
        if own:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C changes nothing any more
        _say_interrupted(words)
        if own:
            _leave()
        return interrupted_status()
    except BrokenPipeError:  # the reader of our output left
        return BROKEN_PIPE
    finally:
        _drop_unwritten()


def _drop_unwritten() -> None:
    """Drop the output that could not be written: Python would try again at exit, and end with a
    status of its own, 120.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stand_in_for_closed_streams() -> None:
    """Let what is printed fail where our starter closed stdout, and be lost where it closed stderr.

    Else no bytes of an object would be a success, and notes would go to stdout, among an object's
    bytes.
    """
    streams = sys.stdout, sys.stderr
    if streams[0] is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if streams[1] is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _run(arguments: Sequence[str] | None, words: Sequence[str]) -> int:  # noqa: PLR0911, PLR0912 - one for each way to end
    import typer.main  # noqa: PLC0415  loading typer takes longer than most of what uses this package

    from caf_pipeline.cli.app import build  # noqa: PLC0415  as above

    wanted = next((word for word in words if word != "--"), "")
    try:
        status = typer.main.get_command(build(wanted)).main(
            args=arguments, prog_name="caf", standalone_mode=False
        )
        sys.stdout.flush()
    except CafError as error:
        if interrupt_behind(error):
            raise KeyboardInterrupt from error
        return _fail(str(error), error.hint, error.exit_code)
    except typer.exceptions.TyperException as error:
        hint = "`caf --help` and `caf COMMAND --help` say how."
        if type(error).__name__ == "NoSuchOption":
            hint += (
                " A name or key that begins with '-' follows '--', as in: caf get SOURCE -- -KEY"
            )
        return _fail(_in_our_words(error.format_message()), hint, error.exit_code)
    except typer.Abort as error:
        if isinstance(
            error.__context__, KeyboardInterrupt
        ):  # else a question that was answered by the end of the input
            raise KeyboardInterrupt from error
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
    if status == INTERRUPTED:  # what typer makes of Ctrl-C
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0


def _say_interrupted(words: Sequence[str]) -> None:
    """Say in one sentence what an interrupt means for the work."""
    goes_on = any(tuple(words[: len(command)]) == command for command in _GO_ON)
    then = (
        "the same command goes on where it stopped"
        if goes_on
        else "the same command does it from the beginning"
    )
    if {"--watch", "--serve"} & set(words):
        then = "it only looked on, and what it looked at goes on"
    print(f"caf: interrupted; {then}", file=sys.stderr)


def _leave() -> None:
    """End the process where threads still wait for servers: the interpreter would wait for them."""
    threads = [
        one
        for one in threading.enumerate()
        if one is not threading.current_thread() and not one.daemon
    ]
    if threads:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(interrupted_status())


def sentence(error: OSError) -> str:
    """Say what the system refused, and on which path."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename!r}: {reason}." if error.filename else f"{reason}."


def _fail(message: str, hint: str, status: int) -> int:
    print(f"caf: error: {one_line(message)}", file=sys.stderr)
    if hint:
        print(f"     hint: {one_line(hint)}", file=sys.stderr)
    return status


_WORDS: Final = (
    (r"Value error, ", ""),
    (r"Input should be a valid integer.*", "it must be a whole number"),
    (r"Input should be a valid number.*", "it must be a number"),
    (r"Input should be greater than or equal to (.+)", r"it must be at least \1"),
    (r"Input should be less than or equal to (.+)", r"it must be at most \1"),
    (r"Input should be ", "it must be "),
)
"""Of what the library that reads arguments says: its words, and ours."""


def _in_our_words(message: str) -> str:
    for theirs, ours in _WORDS:
        message = re.sub(theirs, ours, message)
    return message
