"""Ports for servers whose address must be known before they start."""

import random
import socket

_LOWEST, _HIGHEST = 10_000, 32_000
"""Below those that the kernel gives to outgoing connections, one of which could take a port before
the server does.
"""


def free_port() -> int:
    """Return a port of 127.0.0.1 on which no server listens."""
    while True:
        port = random.SystemRandom().randint(
            _LOWEST, _HIGHEST
        )  # not seeded: test processes side by side draw others
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
