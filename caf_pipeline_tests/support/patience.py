"""How long a test waits for what should happen soon.

It ends hangs and measures nothing: a busy machine takes its time.
"""

import subprocess
import time
from collections.abc import Callable
from typing import Final

PATIENCE_SECONDS: Final = 600
LOOK_SECONDS: Final = 0.1


def wait_for(true: Callable[[], object], process: "subprocess.Popen[bytes] | None" = None) -> None:
    """Wait until it is true; fail where it stays false, or where the process that is to make it
    true has ended.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert process is None or process.poll() is None, (
            f"{process.args} has ended",
            process.communicate(),
        )
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(LOOK_SECONDS)
