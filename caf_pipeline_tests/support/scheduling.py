"""How the tests are spread over processes (`--numprocesses auto --dist loadfile --no-loadscope-reorder`).

Two processes a core, since a test waits for servers and processes half of its time. Files that take long come first: one that
begins when the others are through would run on alone.
"""

import gc
import os
from pathlib import Path
from typing import Final

import pytest

PROCESSES_PER_CORE: Final = 2

LONGEST_FIRST: Final = (
    "faults/test_upgrade_from_0_3_0.py",
    "cli/test_pipeline.py",
    "faults/test_services_daemon.py",
    "dagster_host/test_daemon.py",
    "test_readme.py",
    "maintenance/test_safe_to_delete.py",
    "faults/test_kills_pairs.py",
    "steps/test_current_content.py",
    "cli/test_doctor.py",
    "test_secrets.py",
    "faults/test_services.py",
    "cli/test_jackal.py",
    "faults/test_disk.py",
    "faults/test_s3.py",
    "faults/test_bits.py",
    "faults/test_kills.py",
    "faults/test_order.py",
    "faults/test_upgrade.py",
    "store/test_jackal_posting.py",
    "cli/test_installed.py",
    "cli/test_safe_to_delete.py",
    "cli/test_rebuild.py",
    "system/test_child_environment.py",
    "store/test_jackal_network.py",
    "store/test_hostile_answers.py",
    "dagster_host/test_run_source.py",
    "dagster_host/test_waiting.py",
    "defs/test_watching.py",
    "maintenance/test_doctor_jackal.py",
    "inventory/test_hostile_keys.py",
    "packing/test_crashes.py",
    "packing/test_resume.py",
    "maintenance/test_doctor.py",
    "test_benchmarks.py",
)
"""By what was measured; a file that is not here takes less than half a minute."""

_FOLDER: Final = Path(__file__).parents[1]


def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes `--numprocesses auto` starts."""
    return PROCESSES_PER_CORE * (os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {_FOLDER / name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))  # stable: a file's tests stay together and in order


def pytest_configure() -> None:
    gc.disable()  # what is collected stays: to look through it again and again takes a quarter of the collection


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # DuckDB tells of leaks where its objects are left at the end
