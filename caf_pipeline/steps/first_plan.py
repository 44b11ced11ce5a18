"""Whether what the ledger does not have of a source may be in the store already, so that a plan
would pay for it again.

An empty home, a ledger that was rebuilt for other sources only, and a source of another name look
alike: no chunk is known. Source: promise 3 in docs/explanation/design.md.
"""

from collections.abc import Mapping

from caf_pipeline.errors import StoredAlready
from caf_pipeline.run_context import RunContext, address_of, archive_id_of
from caf_pipeline.store.protocol import ArchiveFiles, refuse_unknown_posts
from caf_pipeline.system.quantities import counted


def refuse_new_archive(context: RunContext) -> None:
    """Raise where the source was restored in part, or has no chunk while the store has files that
    may hold its objects.

    Those are files of its owner: of the source's archive; of any other archive, unless the ledger
    or the settings have it as one of another address, since an archive's id changes with the
    source's name; and files whose note cannot be read. The store is asked only while the ledger has
    no chunk of the source that was packed: what was adopted says nothing of those.

    Raises: StoredAlready. And what `ChunkStore.archives` raises: what cannot be asked is not taken
        for "nothing".
    """
    if began_at := context.ledger.rebuilds.began_at(context.source):
        raise StoredAlready(
            f"the rebuild of '{context.source}' that began at {began_at:%Y-%m-%d %H:%M} UTC has "
            "not restored all that the store"
            " lists: nothing was planned, since the rest would be archived and paid for again",
            hint=f"'caf rebuild {context.source}' goes on with it and says what is missing; to "
            "archive the rest again,"
            f" 'caf run {context.source} --new-archive'",
        )
    if not all(chunk.adopted for chunk in context.ledger.chunks.list(context.source)):
        return
    elsewhere = {
        archive for archive, address in _known(context).items() if address != context.address
    }
    files = {
        archive: count
        for archive, count in context.store.archives().items()
        if archive not in elsewhere
    }
    if files:
        raise _refusal(context, files)


def refuse_unknown(context: RunContext) -> None:
    """Raise StoredAlready if the store has posts of the source that the ledger does not know.

    It has such posts after an older backup of the ledger was restored.
    """
    refuse_unknown_posts(
        context.store.unknown_posts(context.archive_id, context.ledger.transactions(context.holder))
    )


def leave_unknown(context: RunContext) -> None:
    """Let the ledger remember that objects of unknown posts may be archived again: an operator
    ordered a new archive.
    """
    log = context.ledger.transactions(context.holder)
    context.ledger.rebuilds.leave_posts(
        context.source, context.store.unknown_posts(context.archive_id, log), superseded=False
    )
    context.store.unknown_posts(context.archive_id, log)  # records that no post is unknown any more


def _known(context: RunContext) -> Mapping[str, str]:
    """Return the addresses of all sources that the ledger or the settings have, by their archives'
    ids.
    """
    set_up = {name: address_of(source) for name, source in context.settings.sources.items()}
    return {
        **context.ledger.sources.addresses(),
        **{archive_id_of(name, address): address for name, address in set_up.items()},
    }


def _refusal(context: RunContext, files: Mapping[str | None, ArchiveFiles]) -> StoredAlready:
    source, total = context.source, sum(archive.count for archive in files.values())
    others = {*context.ledger.lookup.sources(), *context.settings.sources} - {source}
    same_place = sorted(name for name in others if archive_id_of(name, context.address) in files)
    if context.archive_id in files:
        whose = f"{files[context.archive_id].count:,} of them of this source"
        remedy = f"'caf rebuild {source}' restores them into the ledger"
    elif same_place:
        whose = f"those of source '{same_place[0]}', which has the same bucket and prefix"
        remedy = (
            f"name the source '{same_place[0]}' again, and run 'caf rebuild {same_place[0]}' "
            "if chunks of it are missing"
        )
    else:
        whose = (
            "none of them of a source that the ledger or caf.toml has, so that it may have "
            "had "
            "another name or address"
        )
        remedy = (
            "give the source the name, endpoint, bucket and prefix that it was archived "
            "with, "
            "and run 'caf rebuild'"
        )
    names = {archive_id_of(name, context.address): name for name in {*others, source}}
    listed = "; ".join(
        _described(archive, of, names)
        for archive, of in sorted(files.items(), key=lambda one: one[1].first_at)
    )
    has = "only adopted files" if context.ledger.chunks.list(source) else "no chunk"
    return StoredAlready(
        f"the ledger has {has} of '{source}', but the store lists {counted(total, 'file')} that "
        f"may hold its objects, {whose}:"
        " nothing was planned, since all of it may be archived and paid for again. The wallet's "
        f"archives: {listed}",
        hint=f"{remedy}; if '{source}' is none of these archives, 'caf run {source} --new-archive'",
    )


def _described(archive: str | None, files: ArchiveFiles, names: Mapping[str, str]) -> str:
    """Describe an archive: its id, its source if the ledger or the settings have it, its chunks,
    its first and last date.
    """
    name = "an archive whose note cannot be read" if archive is None else archive
    source = f" (source '{names[archive]}')" if archive is not None and archive in names else ""
    days = f"{files.first_at:%Y-%m-%d} to {files.last_at:%Y-%m-%d}"
    return f"{name}{source} with {counted(files.count, 'chunk')}, {days}"
