"""`caf setup`: what a machine needs once before Dagster runs chunks on it: its folder, and how many
steps may share a pool.

Tables are not part of it: the ledger's and Dagster's are made and migrated by whatever opens them
first. Source: "Concurrency pools" in Dagster's documentation; the rule is in
docs/how-to/sizing.md.
"""

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from json import dumps as dump_json
from pathlib import Path
from typing import Final

import psutil
from dagster import DagsterInstance

from caf_pipeline.dagster_host.home import (
    HOME_VARIABLE,
    INSTANCE_FILE,
    WORKSPACE_FILE,
    dagster_home,
    is_own,
)
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.defs.naming import S3_POOL, UPLOAD_POOL
from caf_pipeline.errors import SettingsError
from caf_pipeline.settings import Settings, SourceSettings
from caf_pipeline.system.quantities import counted, show_size

RUN_BYTES: Final = 300 << 20
"""Memory of one run, as docs/how-to/sizing.md has it."""

UPLOADS: Final = 4
"""At a time, where nothing else sets a bound: each waits for the network, and more make each
slower.
"""


CGROUP: Final = Path("/sys/fs/cgroup")
"""Where a container sees its own limits (Linux, cgroup v2); a machine has none there."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What bounds how much goes on at a time: cores that this process may use, bytes of memory,
    bytes that staging may take.
    """

    cores: int
    memory_bytes: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class PoolLimit:
    """How many steps may be in a pool at a time.

    Attributes:
        limit: what holds from now on.
        computed: what this machine and the settings come to, and `reason` by what.
        change: `set`, `unchanged`, or `kept` where another limit had been set before.
    """

    pool: str
    limit: int
    computed: int
    reason: str
    change: str


def setup_command(
    *, settings: Settings, dry_run: bool = False, reset: bool = False, json: bool = False
) -> int:
    """Prepare DAGSTER_HOME, set the limits of the pools that have none of their own, and say so;
    return the exit status.

    Args:
        settings: of the home and all sources.
        dry_run: only say what would be done.
        reset: also set limits that were set before.
        json: say it as one JSON object on standard output.

    Raises:
        SettingsError: the folder or Dagster's storage cannot be used.
    """
    home = dagster_home(settings)
    made = _state_of(home)
    with _opened(settings, dry_run=dry_run) as instance:
        most_runs = instance.get_concurrency_config().run_queue_config
        limits = computed_limits(
            this_machine(settings), settings, most_runs.max_concurrent_runs if most_runs else 0
        )
        pools = [
            _set(instance, pool, *limits[pool], reset=reset, dry_run=dry_run) for pool in limits
        ]
    if json:
        about = {
            "dagster_home": str(home),
            "change": made,
            "pools": [asdict(one) for one in pools],
            "dry_run": dry_run,
        }
        sys.stdout.write(dump_json(about) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _said(home, made, pools, dry_run=dry_run))
    sys.stdout.flush()
    return 0


def this_machine(settings: Settings) -> Machine:
    """Return what this machine has, or the container that this is, of what a run of a chunk
    needs.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    memory_bytes = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # none, or "max"
        memory_bytes = min(memory_bytes, int((CGROUP / "memory.max").read_text()))
    with suppress(OSError, ValueError):
        quota, period = map(int, (CGROUP / "cpu.max").read_text().split())
        cores = min(cores, max(quota // period, 1))
    folder = next(
        one
        for one in (settings.staging_folder.absolute(), *settings.staging_folder.absolute().parents)
        if one.is_dir()
    )
    try:
        disk = shutil.disk_usage(folder).total
    except OSError as error:
        raise SettingsError(
            f"the disk of {folder} cannot be asked for its size: {error.strerror}"
        ) from error
    return Machine(cores, memory_bytes, min(settings.packing.staging_limit or disk, disk))


def computed_limits(
    machine: Machine, settings: Settings, most_runs: int
) -> Mapping[str, tuple[int, str]]:
    """Return the limit of each pool, and by what it is so low; `most_runs` go on at a time, 0 for
    any number.
    """
    sources = settings.sources.values()
    chunk = max(
        (its.target_size for its in sources),
        default=SourceSettings.model_fields["target_size"].default,
    )
    either = [
        (
            machine.memory_bytes // 2 // RUN_BYTES,
            f"{show_size(RUN_BYTES)} a run of half of {show_size(machine.memory_bytes)} of memory",
        ),
        (
            machine.staging_bytes // chunk,
            f"{show_size(machine.staging_bytes)} for staging, {show_size(chunk)} a chunk",
        ),
    ]
    if most_runs:
        either.append((most_runs, f"{counted(most_runs, 'run')} at a time by {INSTANCE_FILE}"))
    packing = [(machine.cores, counted(machine.cores, "core")), *either]
    sending = [(UPLOADS, f"{UPLOADS} share the network"), *either]
    jackal = settings.jackal
    if settings.store.kind == "jackal" and jackal.bandwidth:
        needed = int(jackal.copies * chunk / jackal.upload_seconds)
        reason = (
            f"{show_size(jackal.bandwidth)}/s of bandwidth, {show_size(needed)}/s for a "
            "chunk "
            "that is sent in time"
        )
        sending.append((int(jackal.bandwidth // max(needed, 1)), reason))
    return {pool: _lowest(bounds) for pool, bounds in ((S3_POOL, packing), (UPLOAD_POOL, sending))}


def _lowest(bounds: Sequence[tuple[int, str]]) -> tuple[int, str]:
    limit, reason = min(bounds, key=lambda bound: bound[0])
    return max(limit, 1), reason


def _state_of(home: Path) -> str:
    """Return what becomes of the folder: `made`, `unchanged`, or `kept` where it has a dagster.yaml
    of the operator's own.
    """
    file = home / INSTANCE_FILE
    if is_own(file):
        return "kept"
    return "unchanged" if file.is_symlink() else "made"


@contextmanager
def _opened(settings: Settings, *, dry_run: bool) -> Iterator[DagsterInstance]:
    """Open Dagster's instance; for a dry run where there is none yet, in a folder that is removed
    again.
    """
    if not dry_run or dagster_home(settings).is_dir():
        with open_instance(settings) as instance:
            yield instance
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        open_instance(settings.model_copy(update={"home": Path(folder)})) as instance,
    ):
        yield instance


def _set(
    instance: DagsterInstance, pool: str, computed: int, reason: str, *, reset: bool, dry_run: bool
) -> PoolLimit:
    own = {
        one.name: one.limit
        for one in instance.event_log_storage.get_pool_limits()
        if not one.from_default
    }
    known = own.get(pool)
    if known == computed:
        return PoolLimit(pool, computed, computed, reason, "unchanged")
    if known is not None and not reset:
        return PoolLimit(pool, known, computed, reason, "kept")
    if not dry_run:
        instance.event_log_storage.set_concurrency_slots(pool, computed)
    return PoolLimit(pool, computed, computed, reason, "set")


def _said(home: Path, made: str, pools: Sequence[PoolLimit], *, dry_run: bool) -> Iterator[str]:
    would = "would " if dry_run else ""
    yield {
        "made": f"{would}make {home}" if dry_run else f"made {home}",
        "unchanged": f"left {home} as it is",
        "kept": f"left {home} as it is, with a {INSTANCE_FILE} of your own",
    }[made]
    for one in pools:
        if one.change == "kept":
            comes_to = f"this machine comes to {one.computed} ({one.reason}), which --reset sets"
            yield f"left pool {one.pool} at {one.limit}, as it was set before; {comes_to}"
        elif one.change == "unchanged":
            yield f"left pool {one.pool} at {one.limit} ({one.reason})"
        else:
            yield f"{would}set pool {one.pool} to {one.limit} ({one.reason})"
    command = (
        f"{HOME_VARIABLE}={shlex.quote(str(home))} dg dev -w "
        f"{shlex.quote(str(home / WORKSPACE_FILE))}"
    )
    yield f"open the UI with: {command}"
