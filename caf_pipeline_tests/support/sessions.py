"""The processes of a session, for tests that hold that nothing is left of what was started."""

import os
from contextlib import suppress

import psutil


def in_session(leader: int) -> list[psutil.Process]:
    """Return the processes of the session that `leader` began, those that only wait to be reaped
    left out.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
