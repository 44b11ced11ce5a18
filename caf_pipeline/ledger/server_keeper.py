"""Starts an embedded Postgres server and stops it when it has had no user for a while.

`embedded.py` runs this file as a process of its own: python FILE SECONDS USERS LOCK COMMAND…
A killed process never stops the server, but the kernel releases its share of the lock on USERS.
The keeper is the server's parent, so it never signals another process. It ends with the server.
"""

import fcntl
import os
import signal
import sys
import time
from typing import Final

POLLS: Final = 10
"""Polls in a row that must find no user. A suspended machine does not poll."""

START_SECONDS: Final = 60
"""How long the caller's child reports a failed start. A slower server goes on."""


def main(seconds: str, users_path: str, lock_path: str, *command: str) -> None:
    """Start the server in the background, and exit with status 1 if the server ends."""
    users = os.open(users_path, os.O_RDWR)
    lock = os.open(lock_path, os.O_RDWR)
    if keeper := os.fork():
        signal.alarm(START_SECONDS)
        os.waitpid(keeper, 0)
        sys.exit(1)
    os.setsid()
    server = os.fork()
    if not server:
        os.execv(command[0], command)

    def end_with_server(*_: object) -> None:
        if os.waitpid(server, os.WNOHANG)[0]:
            os._exit(0)

    signal.signal(signal.SIGCHLD, end_with_server)
    end_with_server()
    polls_without_user = 0
    while True:
        time.sleep(float(seconds) / POLLS)
        # A new user takes both locks in this order, so it waits here, or is seen here.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_unused(users, users_path):
            polls_without_user += 1
            if polls_without_user > POLLS:
                os.kill(server, signal.SIGINT)  # "fast": as pg_ctl stops it
                while True:
                    time.sleep(1)  # not `pause`: a signal right before it would be lost
        else:
            polls_without_user = 0
        fcntl.flock(users, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_UN)


def _is_unused(users: int, users_path: str) -> bool:
    """Lock out users if there are none. Users of a replaced file are invisible, so they count."""
    try:
        if not os.path.samestat(os.stat(users_path), os.fstat(users)):
            return False
    except OSError:  # the folder was deleted or moved
        pass
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
