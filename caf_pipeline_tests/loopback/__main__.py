"""The command line of the loopback network. See the package's docstring."""

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from caf_pipeline_tests.loopback.options import Options
from caf_pipeline_tests.loopback.program import Program


def _amount(text: str) -> tuple[str, int]:
    address, equals, amount = text.partition("=")
    if not equals or not amount.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not ADDRESS=NUMBER")
    return address, int(amount)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m caf_pipeline_tests.loopback",
        description="Run a Jackal network on this machine: a chain's REST servers and providers on "
        "ports of 127.0.0.1.",
        epilog="Later starts from a folder use the options of its first start unless you pass "
        "others.",
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder of the network's state")
    parser.add_argument("--port", type=int, help="of the first LCD; 0 for a free one")
    parser.add_argument("--providers", type=int, help="how many (3)")
    parser.add_argument("--lcds", type=int, help="REST servers of the chain (1)")
    parser.add_argument("--chain-id", help="(loopback-1)")
    parser.add_argument("--block-seconds", type=float, help="between blocks (1)")
    parser.add_argument(
        "--fund",
        type=_amount,
        action="append",
        metavar="ADDRESS=UJKL",
        help="at genesis; may be repeated",
    )
    parser.add_argument(
        "--space", type=_amount, action="append", metavar="ADDRESS=BYTES", help="bought at genesis"
    )
    parser.add_argument("--space-days", type=int, help="for how long it is bought (365)")
    parser.add_argument(
        "--version",
        help="of the chain's software (5.1.0); before 5.1 it verifies proofs of type 0 only",
    )
    parser.add_argument("--proof-window", type=int, help="blocks (50)")
    parser.add_argument(
        "--no-zero-draws", type=int, choices=(0, 1), help="whether leaf 0 is never drawn (0)"
    )
    parser.add_argument("--min-gas-price", type=float, help="ujkl (0.002)")
    parser.add_argument("--price", type=int, help="ujkl for a GB and 30 days (25000)")
    parser.add_argument("--provider-space", type=int, help="bytes of each provider (1 TiB)")
    parser.add_argument("--upload-seconds", type=float, help="for which an upload is read (600)")
    parser.add_argument("--reply-seconds", type=float, help="after which no reply is written (300)")
    parser.add_argument(
        "--job-seconds", type=float, help="for which a finished upload is remembered (600)"
    )
    parser.add_argument(
        "--clock-days", type=float, help="of the chain's clock ahead of this machine's (0)"
    )
    parser.add_argument(
        "--while-stdin-is-open", action="store_true", help="end when standard input does"
    )
    return parser


def _wait_for_end_of_input(over: SimpleQueue[None]) -> None:
    # Not through sys.stdin: its lock would block the interpreter's exit.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    over.put(None)


def end_signals() -> SimpleQueue[None]:
    """Return a queue that receives an entry at each SIGTERM and SIGINT from now on.

    Ctrl-C sends both: from the terminal, and from the program that started this one. An Event would
    deadlock if the second signal came while its lock is held.
    """
    over = SimpleQueue[None]()

    def end(signal_number: int, frame: FrameType | None) -> None:
        over.put(None)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    return over


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    arguments = vars(_parser().parse_args())
    folder: Path = arguments.pop("folder")
    watch_input: bool = arguments.pop("while_stdin_is_open")
    for name in ("fund", "space"):
        arguments[name] = dict(arguments[name]) if arguments[name] else None
    program = Program(folder, Options.open(folder, arguments))
    over = end_signals()
    if watch_input:
        threading.Thread(target=_wait_for_end_of_input, args=(over,), daemon=True).start()
    print(json.dumps(program.start()), flush=True)
    over.get()
    program.stop()


if __name__ == "__main__":
    main()
