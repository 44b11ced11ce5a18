"""The processes of a session, for tests that no process is left behind."""

import os
from contextlib import suppress

import psutil


def in_session(leader: int) -> list[psutil.Process]:
    """Return the running processes of the session that `leader` began, without zombies."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
