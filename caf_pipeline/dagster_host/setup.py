"""`caf setup`: prepares DAGSTER_HOME and sets the limits of the pools for this machine.

Source: "Concurrency pools" in Dagster's documentation; docs/how-to/sizing.md.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from json import dumps as dump_json
from pathlib import Path
from typing import Final

from dagster import DagsterInstance

from caf_pipeline.dagster_host.home import INSTANCE_FILE, dagster_home, is_own
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.dagster_host.team_project import team_project
from caf_pipeline.errors import SettingsError, UsageError
from caf_pipeline.naming import S3_POOL, UPLOAD_POOL
from caf_pipeline.settings import Settings, SourceSettings
from caf_pipeline.system.processes import CGROUP, memory_bytes
from caf_pipeline.system.quantities import counted, show_size

RUN_BYTES: Final = 300 << 20

UPLOADS: Final = 4
"""Default; more would make each slower."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of this machine or container."""

    cores: int
    memory_bytes: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class PoolLimit:
    """The number of steps that a pool allows concurrently.

    Attributes:
        computed: the limit for this machine, determined by `reason`.
        change: `set`, `unchanged`, or `kept` if an operator has set another limit.
    """

    pool: str
    limit: int
    computed: int
    reason: str
    change: str


def setup_command(
    *, settings: Settings, dry_run: bool = False, reset: bool = False, json: bool = False
) -> int:
    """Prepare DAGSTER_HOME and the pools; return the exit status.

    `reset` also replaces limits that an operator has set. Raises a UsageError in a team's project.
    """
    if project := team_project(settings.folder):
        raise UsageError(
            f"{project.root} is a Dagster project of its own, and `caf setup` leaves it alone",
            hint=f"limit the pools by `dagster instance concurrency set {S3_POOL} N`, and "
            f"{UPLOAD_POOL} likewise",
        )
    home = dagster_home(settings)
    file = home / INSTANCE_FILE
    # `lexists` is also False in a folder of another user, which `open_instance` then names.
    exists = os.path.lexists(file)
    change = ("kept" if is_own(file) else "unchanged") if exists else "made"
    with ExitStack() as stack:
        instance_settings = settings
        if dry_run and not home.is_dir():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            instance_settings = settings.model_copy(update={"home": Path(folder)})
        instance = stack.enter_context(open_instance(instance_settings))
        run_queue = instance.get_concurrency_config().run_queue_config
        max_runs = run_queue.max_concurrent_runs if run_queue else 0
        pools = [
            _set_limit(instance, pool, computed, reason, reset=reset, dry_run=dry_run)
            for pool, (computed, reason) in computed_limits(
                this_machine(settings), settings, max_runs
            ).items()
        ]
    if json:
        report = {
            "dagster_home": str(home),
            "change": change,
            "pools": [asdict(pool) for pool in pools],
            "dry_run": dry_run,
        }
        sys.stdout.write(dump_json(report) + "\n")
    else:
        lines = _report(home, change, pools, dry_run=dry_run)
        sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()
    return 0


def this_machine(settings: Settings, cgroup: Path = CGROUP) -> Machine:
    """Measure this machine or container."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with suppress(OSError, ValueError):
        quota, period = map(int, (cgroup / "cpu.max").read_text().split())
        cores = min(cores, max(quota // period, 1))
    staging = settings.staging_folder.absolute()
    folder = next(path for path in (staging, *staging.parents) if path.is_dir())
    try:
        disk = shutil.disk_usage(folder).total
    except OSError as error:
        raise SettingsError(
            f"the size of the disk of {folder} cannot be read: {error.strerror}"
        ) from error
    return Machine(cores, memory_bytes(cgroup), min(settings.packing.staging_limit or disk, disk))


def computed_limits(
    machine: Machine, settings: Settings, max_runs: int
) -> Mapping[str, tuple[int, str]]:
    """Return each pool's limit and reason; 0 `max_runs`: no limit."""
    chunk_bytes = max(
        (source.target_size for source in settings.sources.values()),
        default=SourceSettings.model_fields["target_size"].default,
    )
    both = [
        (
            machine.memory_bytes // 2 // RUN_BYTES,
            f"{show_size(RUN_BYTES)} per run in half of {show_size(machine.memory_bytes)} memory",
        ),
        (
            machine.staging_bytes // chunk_bytes,
            f"{show_size(chunk_bytes)} per chunk in {show_size(machine.staging_bytes)} staging",
        ),
    ]
    if max_runs:
        both.append((max_runs, f"{counted(max_runs, 'concurrent run')} by {INSTANCE_FILE}"))
    packing = [(machine.cores, counted(machine.cores, "core")), *both]
    sending = [(UPLOADS, f"{UPLOADS} uploads share the network"), *both]
    jackal = settings.jackal
    if settings.store.kind == "jackal" and jackal.bandwidth:
        needed = int(jackal.copies * chunk_bytes / jackal.upload_seconds)
        reason = (
            f"{show_size(needed)}/s to send a chunk in time, of {show_size(jackal.bandwidth)}/s "
            "bandwidth"
        )
        sending.append((int(jackal.bandwidth // max(needed, 1)), reason))
    limits = {}
    for pool, bounds in ((S3_POOL, packing), (UPLOAD_POOL, sending)):
        limit, reason = min(bounds, key=lambda bound: bound[0])
        limits[pool] = max(limit, 1), reason
    return limits


def _set_limit(
    instance: DagsterInstance, pool: str, computed: int, reason: str, *, reset: bool, dry_run: bool
) -> PoolLimit:
    limits = {
        item.name: item.limit
        for item in instance.event_log_storage.get_pool_limits()
        if not item.from_default
    }
    current = limits.get(pool)
    if current == computed:
        return PoolLimit(pool, computed, computed, reason, "unchanged")
    if current is not None and not reset:
        return PoolLimit(pool, current, computed, reason, "kept")
    if not dry_run:
        instance.event_log_storage.set_concurrency_slots(pool, computed)
    return PoolLimit(pool, computed, computed, reason, "set")


def _report(home: Path, change: str, pools: Sequence[PoolLimit], *, dry_run: bool) -> Iterator[str]:
    would = "would " if dry_run else ""
    yield {
        "made": f"would create {home}" if dry_run else f"created {home}",
        "unchanged": f"left {home} unchanged",
        "kept": f"left {home} unchanged, with your own {INSTANCE_FILE}",
    }[change]
    for pool in pools:
        if pool.change == "kept":
            yield (
                f"left pool {pool.pool} at {pool.limit}, as set before; --reset sets the limit for "
                f"this machine, {pool.computed} ({pool.reason})"
            )
        elif pool.change == "unchanged":
            yield f"left pool {pool.pool} at {pool.limit} ({pool.reason})"
        else:
            yield f"{would}set pool {pool.pool} to {pool.limit} ({pool.reason})"
    yield "open the UI with: caf ui"
