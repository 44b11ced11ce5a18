"""A limit for each test: a test that hangs fails with the stacks of all threads.

pytest's own `faulthandler_exit_on_timeout` ends the process. pytest-xdist would run the test again
in the next one, and the servers of the session would stay. pytest-timeout needs SIGALRM, which
`command_line` uses.
"""

import faulthandler
import signal
import tempfile
import threading
from collections.abc import Generator
from types import FrameType
from typing import Final

import pytest

from caf_pipeline_tests.support.patience import PATIENCE_SECONDS

LIMIT_SECONDS: Final = 3.0 * PATIENCE_SECONDS
"""A wait of a test ends by itself after PATIENCE_SECONDS. A test may have several."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Interrupt the test in the main thread. The soak's tests have no limit."""
    if item.config.getoption("--soak", default=False):
        return (yield)
    before = signal.signal(signal.SIGUSR1, _fail)
    main_thread = threading.get_ident()
    timer = threading.Timer(LIMIT_SECONDS, signal.pthread_kill, (main_thread, signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def _fail(number: int, frame: FrameType | None) -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        pytest.fail(f"the test took more than {LIMIT_SECONDS:.0f} s\n{file.read()}")
