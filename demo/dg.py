"""Dagster's `dg` for `demo/ui.py`: ends with its parent process, and filters the log."""

import signal
import sys

import processes

from caf_pipeline.dagster_host.logging_filters import add_logging_filters

if __name__ == "__main__":
    # A shell starts background processes with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes.end_with_parent(signal.SIGINT)
    add_logging_filters()
    from dagster_dg_cli.cli import main

    sys.exit(main())
