"""Dagster's `dg` as `demo/ui.py` starts it: it ends with who started it, and says nothing that is
not for the user.
"""

import signal
import sys

import processes

from caf_pipeline.dagster_host.logging_filters import add_logging_filters

if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell starts what is in the background with SIGINT ignored
    processes.end_with_parent(signal.SIGINT)
    add_logging_filters()
    from dagster_dg_cli.cli import main

    sys.exit(main())
