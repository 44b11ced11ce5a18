"""The entry point of the process `caf`: what Ctrl-C means while the command line itself is still loaded."""

import atexit
import os
import signal
from types import FrameType

_INTERRUPTED = 130  # `errors.INTERRUPTED`: while that module is loaded, or `typing`, Ctrl-C would still leave a traceback
_SENTENCE = b"caf: interrupted; the same command goes on where it stopped\n"


def main() -> int:
    """Run the command of this process's arguments; return its exit status."""
    signal.signal(signal.SIGINT, _leave)
    # Else pydantic reads the metadata of all installed packages, in search of plugins: a twentieth of a second.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Else numpy, which pyarrow loads, starts a thread for each core, which spins at first; none is needed here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from caf_pipeline.system.garbage import end_without_looks, look_rarely  # noqa: PLC0415  loading is what may be interrupted

    ends_with = end_without_looks()
    from caf_pipeline.system.left_out import leave_out_unused  # noqa: PLC0415

    leave_out_unused()
    from caf_pipeline.cli import main as command  # noqa: PLC0415
    from caf_pipeline.system.ending import end_in_order, ignore_further, interrupted_status  # noqa: PLC0415

    look_rarely()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_in_order()
        status = command()
        atexit.register(ignore_further)
        return ends_with(status)
    except KeyboardInterrupt:  # the command line says it itself but for its first lines and its last
        os.write(2, _SENTENCE)
        atexit.register(ignore_further)
        return ends_with(interrupted_status())  # what a command opened is closed before, an embedded Postgres, say


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process: nothing was begun."""
    os.write(2, _SENTENCE)
    os._exit(_INTERRUPTED)
