"""Checks that a port which the demo needs is free, before anything is started."""

import socket
import sys


def answers(host: str, port: int) -> bool:
    """Return whether a program accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def require_free(host: str, port: int, *, user: str, hint: str) -> None:
    """End this process with one sentence if the port cannot be listened on.

    `user` is what needs the port.
    """
    reason = "another program uses it"
    if not answers(host, port):
        with socket.socket() as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # a port that was just left is free
            try:
                probe.bind((host, port))
                return
            except OSError as error:
                reason = error.strerror or str(error)
    sys.exit(
        f"{user} needs port {port} of {host}, which is not free ({reason}): end that program, or "
        f"{hint}"
    )
