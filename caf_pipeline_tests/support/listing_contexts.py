"""A run context for listings, which needs no ledger, and the folders that listings leave."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from caf_pipeline.run_context import Lazy, RunContext
from caf_pipeline.settings import Settings
from caf_pipeline.system.processes import this_process
from caf_pipeline.waits import Waits

NO_LEDGER = SimpleNamespace(  # everything that a listing needs of the ledger
    notices=SimpleNamespace(mark_noticed=lambda *_: None),
    leases=SimpleNamespace(hold=lambda *_, **__: nullcontext()),
    sources=SimpleNamespace(address=lambda _: None, register=lambda *_, **__: None),
    chunks=SimpleNamespace(has_version_ids=lambda _: False),
)


def a_listing_context(folder: Path, objects, *, waits=None, **source) -> RunContext:
    settings = Settings(home=folder, sources={"src": {"bucket": "bucket-of-script", **source}})
    return RunContext(
        "src",
        settings,
        this_process("run-1"),
        *map(Lazy.of, (objects, None, NO_LEDGER)),
        waits=waits or Waits(),
    )


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("inventories/src/.*"))
