"""Run contexts for tests, with any source and store, and a real ledger."""

from collections.abc import Callable
from pathlib import Path

from caf_pipeline.inventory.accounting import Accounting
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline.run_context import Lazy, RunContext
from caf_pipeline.settings import Settings
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline.store.protocol import ChunkStore
from caf_pipeline.system.processes import Holder, this_process

CHUNK_STEPS = (
    chunk_steps.load_batch,
    chunk_steps.pack_chunk,
    chunk_steps.seal_chunk,
    chunk_steps.post_file,
    chunk_steps.upload_chunk,
    chunk_steps.verify_stored,
    chunk_steps.load_locations,
    chunk_steps.release_staging,
)


StoreMaker = Callable[[Settings, Ledger, Holder], ChunkStore]


def a_run_context(
    folder: Path,
    source,
    ledger,
    *,
    run="run-1",
    target="1MiB",
    public=True,
    store: ChunkStore | StoreMaker | None = None,
    throttle=None,
    **settings,
) -> RunContext:
    """Open a run context of the source `src`.

    Args: store: an open store, or what opens one as `open_jackal_store` does; a folder under
        `folder` by default. settings: sections of the settings beside those set here, e.g.
        `jackal={...}`.
    """
    values = {
        "home": folder / "home",
        "store": {"kind": "directory", "folder": folder / "store"},
        "sources": {"src": {"bucket": "b", "target_size": target, "public": public}},
        "packing": {"part_size": "64KiB", "window_size": "1MiB", "max_requests": 4},
    }
    described = Settings.model_validate(values | settings)
    holder = this_process(run)
    if store is None:
        store = DirectoryStore(described.store.folder, ledger.folder_store)
    elif callable(store):
        store = store(described, ledger, holder)
    context = RunContext(
        "src",
        described,
        holder,
        Lazy.of(source),
        Lazy.of(store),
        Lazy.of(ledger),
        throttle=throttle,
    )
    ledger.sources.register(context.source, context.address)
    return context


def plan(context: RunContext):
    """Take an inventory and plan what is new. A shared store may have files of other tests."""
    return planning.cut_plan(context, inventories.take_inventory(context), new_archive=True)


def account_for_plan(context: RunContext, report: planning.PlanReport) -> Accounting:
    """Account for the inventory of a plan, as the plan's check does."""
    return planning.account_for(context, report.snapshot)


def archive_chunk(context: RunContext, name: str, *, until=None) -> None:
    """Run the steps of a chunk, up to and including one."""
    for step in CHUNK_STEPS:
        step(context, name)
        if step is until:
            return


def first_chunk(context: RunContext, until=None) -> str:
    """Plan what is new, and archive the first chunk up to a step. Return its name."""
    name = plan(context).chunks[0].name
    if until:
        archive_chunk(context, name, until=until)
    return name


def archive_everything(context: RunContext) -> list[str]:
    """Plan what is new and archive all planned chunks; return their names."""
    names = [chunk.name for chunk in plan(context).chunks]
    for name in names:
        archive_chunk(context, name)
    return names


def object_bytes(context: RunContext, key: str, version: str | None = None) -> bytes:
    """Return an archived object. An encrypted one needs the context's identity."""
    return b"".join(fetch(context.ledger.lookup, context.opened, "src", key, version).pieces)


def every_object_reads_back(context: RunContext) -> None:
    """Assert that the archive returns each object of a memory source."""
    for key, body in context.objects.bodies.items():
        assert object_bytes(context, key) == body, key
