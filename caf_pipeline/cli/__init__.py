"""The entry point of `caf`, and how errors end a process.

An error is one sentence on stderr, perhaps a hint, and an exit status; never a traceback. Importing
this package loads nothing heavy. Commands that need Dagster are in `dagster_host`.
"""

import atexit
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Final

from caf_pipeline.errors import INTERRUPTED, CafError, exit_code_of, interrupt_behind, one_line
from caf_pipeline.system.ending import interrupted_status

BROKEN_PIPE: Final = 141  # 128 + SIGPIPE
TRACEBACK_VARIABLE: Final = "CAF_TRACEBACK"
COMPLETE_VARIABLE: Final = "_CAF_COMPLETE"
"""Set by a shell's script while `caf` completes a command line."""
_RESUMABLE: Final = frozenset(
    ("run", "backfill", "rebuild", "adopt", "restore", "prove", "repair", "remove")
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default with the process's arguments; return its exit status."""
    # The parent may have closed the streams. Otherwise `caf get` would succeed without output, and
    # notes would go to stdout.
    streams = sys.stdout, sys.stderr
    if streams[0] is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")  # prints fail
    if streams[1] is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A key may have characters that the terminal's encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(arguments, words)
    except KeyboardInterrupt:
        is_process = arguments is None and threading.current_thread() is threading.main_thread()
        if is_process:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore a second Ctrl-C
        consequence = "the same command starts again from the beginning"
        if _RESUMABLE & set(words[:1]):
            consequence = "the same command goes on where it stopped"
        if {"--watch", "--serve"} & set(words):
            consequence = "it only watched, and the runs go on"
        print(f"caf: interrupted; {consequence}", file=sys.stderr)
        if is_process and any(
            thread is not threading.current_thread() and not thread.daemon
            for thread in threading.enumerate()
        ):
            # The interpreter would wait for threads that still wait for servers.
            sys.stdout.flush()
            sys.stderr.flush()
            atexit._run_exitfuncs()
            os._exit(interrupted_status())
        return interrupted_status()
    except BrokenPipeError:  # the reader of the output left
        return BROKEN_PIPE
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            # Drop the output: Python would try again at exit, and end with status 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None, words: Sequence[str]) -> int:  # noqa: PLR0911, PLR0912 - one for each way to end
    import typer.main  # noqa: PLC0415  slower to load than most users of this package

    from caf_pipeline.cli.app import build  # noqa: PLC0415  loads typer

    if os.environ.get(COMPLETE_VARIABLE):
        from caf_pipeline.cli.about import words_to_complete  # noqa: PLC0415

        words = words_to_complete()
    command = next((word for word in words if word != "--"), "")
    try:
        status = typer.main.get_command(build(command)).main(
            args=arguments, prog_name="caf", standalone_mode=False
        )
        sys.stdout.flush()
    except CafError as error:
        if interrupt_behind(error):
            raise KeyboardInterrupt from error
        return _fail(str(error), error.hint, error.exit_code, getattr(error, "__notes__", ()))
    except typer.exceptions.TyperException as error:
        hint = "See `caf --help` and `caf COMMAND --help`."
        if type(error).__name__ == "NoSuchOption":
            hint += " Put '--' before a name or key that begins with '-': caf get SOURCE -- -KEY"
        message = error.format_message()
        for pattern, replacement in _REPLACEMENTS:
            message = re.sub(pattern, replacement, message)
        return _fail(message, hint, error.exit_code)
    except typer.Abort as error:
        # Otherwise the input ended at a question.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        return INTERRUPTED
    except SystemExit as error:  # typer's answer to a broken pipe
        raise error.__context__ or error from None
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        message = f"{error.filename!r}: {reason}." if error.filename else f"{reason}."
        return _fail(message, "", exit_code_of(error))
    except MemoryError:
        return _fail("There is not enough memory.", "", CafError.exit_code)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        return _fail(
            f"This should not have happened: {type(error).__name__}: {error}",
            f"It is a bug; report it with the output of {TRACEBACK_VARIABLE}=1.",
            CafError.exit_code,
        )
    if status == INTERRUPTED:  # how typer reports Ctrl-C
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0


def _fail(message: str, hint: str, status: int, notes: Sequence[str] = ()) -> int:
    print(f"caf: error: {one_line(message)}", file=sys.stderr)
    for text in notes:
        print(f"     and {one_line(text)}", file=sys.stderr)
    if hint:
        print(f"     hint: {one_line(hint)}", file=sys.stderr)
    return status


_REPLACEMENTS: Final = (
    (r"Value error, ", ""),
    (r"Input should be a valid integer.*", "it must be a whole number"),
    (r"Input should be a valid number.*", "it must be a number"),
    (r"Input should be greater than or equal to (.+)", r"it must be at least \1"),
    (r"Input should be less than or equal to (.+)", r"it must be at most \1"),
    (r"Input should be ", "it must be "),
)
