"""How the tests are spread over processes (`--numprocesses auto --dist loadfile
--no-loadscope-reorder`).

Five processes on two cores, since a test waits for servers and processes a part of its time: with
four, the cores are idle for a fourteenth of theirs. Files that take long come first: one that
begins when the others are through would run on alone.
"""

import gc
import os
from pathlib import Path
from typing import Final

import pytest

PROCESSES_PER_CORE: Final = 2.5

LONGEST_FIRST: Final = (
    "test_team_command_line.py",
    "dagster_host/test_daemon.py",
    "faults/test_kills_pairs.py",
    "automation/test_dead_runs.py",
    "dagster_host/test_workers.py",
    "steps/test_current_content.py",
    "dagster_host/test_run_source.py",
    "steps/test_split_objects.py",
    "faults/test_services_daemon.py",
    "faults/test_s3.py",
    "dagster_host/test_backfill.py",
    "faults/test_services.py",
    "automation/test_sensors.py",
    "maintenance/test_safe_to_delete.py",
    "faults/test_bits.py",
    "cli/test_safe_to_delete.py",
    "test_readme.py",
    "automation/test_ticks.py",
    "store/test_hostile_answers.py",
    "packing/test_resume.py",
    "faults/test_kills.py",
    "defs/test_assets.py",
    "cli/test_installed.py",
    "steps/test_list_source.py",
    "store/test_jackal_upload.py",
    "dagster_host/test_celery.py",
    "automation/test_event_queue.py",
    "cli/test_jackal.py",
    "cli/test_doctor.py",
    "system/test_child_environment.py",
    "faults/test_disk.py",
    "cli/test_pipeline.py",
    "faults/test_order.py",
    "maintenance/test_doctor.py",
    "maintenance/test_doctor_jackal.py",
    "steps/test_list_versions.py",
    "store/test_jackal_posting.py",
    "faults/test_upgrade.py",
    "defs/test_pages.py",
    "defs/test_page_metadata.py",
    "automation/test_alerting.py",
    "defs/test_resources.py",
    "source/test_s3_source.py",
    "source/test_s3_get.py",
    "maintenance/test_verify_without_us.py",
    "ledger/test_embedded.py",
    "steps/test_versions.py",
    "maintenance/test_older_backup.py",
    "dagster_host/test_remove.py",
    "store/test_jackal_network.py",
    "test_filesystem.py",
    "test_demo_processes.py",
    "steps/test_chunk_steps.py",
    "maintenance/test_chain_listing.py",
    "test_secrets.py",
    "packing/test_private_resume.py",
    "ledger/test_postgres.py",
    "retrieval/test_archive.py",
    "steps/test_steps_on_jackal.py",
    "maintenance/test_private_rebuild.py",
    "steps/test_private_chunks.py",
    "maintenance/test_rebuild.py",
    "maintenance/test_private_deletion.py",
    "source/test_s3_reports.py",
    "cli/test_restore_bucket.py",
    "steps/test_first_plan.py",
    "maintenance/test_repair.py",
    "cli/test_rebuild.py",
    "retrieval/test_archive_network.py",
    "store/test_jackal_proof_types.py",
    "cli/test_moving.py",
    "steps/test_reports.py",
    "dagster_host/test_waiting.py",
    "maintenance/test_scrub.py",
    "cli/test_plans.py",
    "inventory/test_hostile_keys.py",
    "faults/test_world.py",
    "steps/test_planning.py",
)
"""The files by measured time. In a whole run, any other file takes less than 20 s."""

_FOLDER: Final = Path(__file__).parents[1]


def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes `--numprocesses auto` starts."""
    return int(PROCESSES_PER_CORE * (os.cpu_count() or 1))


def places(names: tuple[str, ...]) -> dict[Path, int]:
    """Return the place of each file in the order.

    Raises:
        pytest.UsageError: a name matches no file.
    """
    if missing := [name for name in names if not (_FOLDER / name).is_file()]:
        raise pytest.UsageError(f"support/scheduling.py names files that do not exist: {missing}")
    return {_FOLDER / name: number for number, name in enumerate(names)}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = places(LONGEST_FIRST)
    items.sort(
        key=lambda item: place.get(item.path, len(place))
    )  # stable: a file's tests stay together and in order


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # DuckDB tells of leaks where its objects are left at the end. What is added first comes last:
    # after pytest's own five looks.
    config.add_cleanup(gc.unfreeze)
    # what is collected stays: to look through it again and again takes a quarter of the collection
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # by default, a twentieth of all CPU time
    gc.enable()
