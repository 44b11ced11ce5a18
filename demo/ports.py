"""Checks that the demo's ports are free, before it starts anything."""

import socket
import sys


def answers(host: str, port: int) -> bool:
    """Return whether a program accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def require_free(host: str, port: int, *, user: str, hint: str) -> None:
    """End this process with a message if the port is unavailable. `user` names what needs it."""
    reason = "another program uses it"
    if not answers(host, port):
        with socket.socket() as probe:
            # A recently closed port counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return
            except OSError as error:
                reason = error.strerror or str(error)
    sys.exit(
        f"{user} needs port {port} of {host}, which is not free ({reason}): end that program, or "
        f"{hint}"
    )
