"""Refuses plans that would pay again for objects which the store may already have.

An empty home, a ledger rebuilt for other sources, and a renamed source look the same: the ledger
has no chunk. Source: promise 3 in docs/explanation/design.md.
"""

from collections.abc import Mapping

from caf_pipeline.errors import StoredAlready
from caf_pipeline.inventory.manifest import ARCHIVE_ID
from caf_pipeline.run_context import RunContext
from caf_pipeline.store.protocol import ArchiveFiles, refuse_lost_posts, refuse_unknown_posts
from caf_pipeline.system.quantities import counted


def refuse_new_archive(context: RunContext, *, remember: bool = False) -> None:
    """Raise StoredAlready if the store may have objects of the source that the ledger lacks.

    This is so if a rebuild is incomplete, or if the ledger has no packed chunk of the source, while
    the store has archives that may be the source's. Chunks that were given up do not count.
    `remember` lets the ledger remember the listed archives for the first post.
    """
    if began_at := context.ledger.rebuilds.began_at(context.source):
        raise StoredAlready(
            f"the rebuild of '{context.source}' of {began_at:%Y-%m-%d %H:%M} UTC is incomplete: "
            "nothing was planned, since the rest would be archived and paid for again",
            hint=f"'caf rebuild {context.source}' continues it and lists what is missing; 'caf run "
            f"{context.source} --new-archive' archives the rest again",
        )
    chunks = context.ledger.chunks.list(context.source)
    if not all(chunk.adopted or chunk.was_given_up for chunk in chunks):
        return
    if files := _possible_archives(context, remember=remember):
        raise _refusal(context, files)


def refuse_unknown(context: RunContext) -> None:
    """Raise StoredAlready if the store has posts of the source that the ledger lacks, or lost."""
    refuse_lost(context)
    refuse_unknown_posts(
        context.store.unknown_posts(context.archive_id, context.ledger.transactions(context.holder))
    )


def refuse_lost(context: RunContext) -> None:
    """Raise StoredAlready if the ledger lost the objects of a chunk that was posted."""
    log = context.ledger.transactions(context.holder)
    refuse_lost_posts(log.lost_posts(context.archive_id))


def accept_new_archive(context: RunContext) -> None:
    """Record that an operator lets objects be archived again, whatever the store has now."""
    context.ledger.rebuilds.end(context.source)
    context.ledger.sources.set_aside(
        context.source,
        [
            archive
            for archive in _possible_archives(context, remember=True)
            if archive is not None and ARCHIVE_ID.fullmatch(archive)
        ],
    )
    log = context.ledger.transactions(context.holder)
    context.ledger.rebuilds.leave_posts(
        context.source, context.store.unknown_posts(context.archive_id, log), superseded=False
    )
    context.store.unknown_posts(context.archive_id, log)  # records that no post is unknown any more


def _possible_archives(context: RunContext, *, remember: bool) -> Mapping[str | None, ArchiveFiles]:
    """Leave out archives of other addresses and those set aside.

    Posts with an unreadable note count as an archive.
    """
    others = {
        archive.archive_id
        for archive in context.ledger.sources.archives()
        if archive.source != context.source and archive.address != context.address
    }
    log = context.ledger.transactions(context.holder) if remember else None
    left_out = others | context.ledger.sources.ids_set_aside(context.source)
    return {
        archive: files
        for archive, files in context.store.archives(log=log).items()
        if archive not in left_out
    }


def _refusal(context: RunContext, files: Mapping[str | None, ArchiveFiles]) -> StoredAlready:
    source, total = context.source, sum(archive.count for archive in files.values())
    names: dict[str | None, str] = {
        archive.archive_id: archive.source
        for archive in context.ledger.sources.archives()
        if archive.archive_id in files
    }
    same_place = sorted({*names.values()} - {source})
    if source in names.values():
        count = sum(files[archive].count for archive, name in names.items() if name == source)
        owner = f"{count:,} of them belong to this source"
        remedy = f"'caf rebuild {source}' restores them into the ledger"
    elif same_place:
        owner = f"source '{same_place[0]}' has the same bucket and prefix"
        remedy = (
            f"rename the source to '{same_place[0]}', and run 'caf rebuild {same_place[0]}' if "
            "its chunks are missing"
        )
    else:
        owner = "no source of the ledger has these archives"
        remedy = (
            f"'caf rebuild {source}' restores the archives whose chunks name '{source}'. A renamed "
            "source is a new source, so give it its old name first"
        )
    archives = []
    for archive, note in sorted(files.items(), key=lambda item: item[1].first_at):
        name = "an archive whose note cannot be read" if archive is None else archive
        owner_name = f" (source '{names[archive]}')" if archive in names else ""
        days = f"{note.first_at:%Y-%m-%d} to {note.last_at:%Y-%m-%d}"
        archives.append(f"{name}{owner_name} with {counted(note.count, 'chunk')}, {days}")
    adopted = any(chunk.adopted for chunk in context.ledger.chunks.list(source))
    has = "only adopted files" if adopted else "no chunk"
    return StoredAlready(
        f"the ledger has {has} of '{source}', but the store lists {counted(total, 'file')} that "
        f"may hold its objects; {owner}. Nothing was planned, since all of it may be archived and "
        f"paid for again. The archives in the store: {'; '.join(archives)}",
        hint=f"{remedy}; if '{source}' is none of these archives, run 'caf run {source} "
        "--new-archive'",
    )
