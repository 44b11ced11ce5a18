"""Finds files of an archive without a chunk in the ledger: restores chunks, reports other files.

Nothing is ever deleted at a store.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from caf_pipeline.chunk_state import CLAIMING, IN_GOOD_STANDING
from caf_pipeline.errors import (
    ArchiveError,
    ClaimConflict,
    IdentityMissing,
    IllegalMove,
    IntegrityError,
    KeyRefused,
    NotLocated,
    SettingsError,
    StoredAlready,
    StoreError,
    with_hint,
)
from caf_pipeline.ledger.records import chunk_lease, plan_lease
from caf_pipeline.maintenance import rebuild
from caf_pipeline.maintenance.doctor.findings import (
    ALREADY_GONE,
    Actor,
    Examination,
    Finding,
    Kind,
    MendResult,
    UnknownPosts,
    mendable,
    not_checked,
)
from caf_pipeline.maintenance.doctor.key_changes import Change, KeyChange, key_changes
from caf_pipeline.maintenance.rebuild import FileKind
from caf_pipeline.steps.first_plan import refuse_new_archive
from caf_pipeline.system.quantities import counted, show_size

_ORDERS: Final = (UnknownPosts.ADD, UnknownPosts.LEAVE)
_DOUBTFUL: Final = frozenset({FileKind.UNREADABLE, FileKind.CONFLICTING})


def listed_files(examination: Examination) -> Iterator[Finding]:
    """Find own files without a chunk in the ledger.

    Files that other accounts post under our note are ignored. If the ledger has no chunk of the
    source, archives that may be the source's are reported.
    """
    context, source = examination.context, examination.context.source
    if source not in context.settings.sources:
        yield Finding(
            Kind.UNSEEN,
            source,
            "caf.toml does not have this source, so that the store was not asked for chunks that "
            "the ledger does not know",
            "set its bucket, endpoint and prefix to have its files checked",
            Actor.NOBODY,
        )
        return
    sound = {chunk.name for chunk in context.ledger.chunks.list(source, IN_GOOD_STANDING)}
    try:
        try:
            refuse_new_archive(context)
        except StoredAlready as refused:
            yield Finding(Kind.FILE, source, str(refused), str(refused.hint), Actor.OPERATOR)
        try:
            is_order = examination.unknown_posts is UnknownPosts.ADD
            ignored = frozenset() if is_order else context.ledger.rebuilds.left_posts(source)
            for file in rebuild.find_chunks(context, ignored=ignored):
                if file.kind is not FileKind.FOREIGN and (
                    file.kind is not FileKind.KNOWN or file.name not in sound
                ):
                    yield from _file_findings(examination, file)
        except (IdentityMissing, KeyRefused) as error:
            yield not_checked(f"the encrypted files that the store lists of {source}", error)
        if unknown := context.ledger.rebuilds.unknown_posts(source):

            def check_posts() -> MendResult:
                roots = context.store.unknown_posts(
                    context.archive_id, context.ledger.transactions(context.holder)
                )
                if not roots:
                    return MendResult("no post is unknown now: the next run continues")
                remedy = f"'caf run {source} --new-archive' archives their objects again"
                return MendResult(
                    f"{counted(len(roots), 'post')} still unknown; follow the lines above, check "
                    f"again later, or {remedy}",
                    Actor.OPERATOR,
                )

            problem = (
                f"{counted(unknown, 'post')} unknown to the ledger when a run last looked: "
                "nothing is packed or posted"
            )
            yield mendable(
                Kind.FILE,
                source,
                problem,
                "checked again",
                check_posts,
            )
        yield from _foreign_use(examination)
    except (StoreError, SettingsError) as error:
        yield not_checked(f"the files that the store lists of {source}", error)


def _foreign_use(examination: Examination) -> Iterator[Finding]:
    """Find that another ledger may use the account."""
    context = examination.context
    foreign = context.ledger.progress.foreign_use()
    if foreign is None or not foreign.sentence:
        return

    def look_again() -> MendResult:
        context.store.archives(log=context.ledger.transactions(context.holder))
        now = context.ledger.progress.foreign_use()
        if now is None or not now.archives:
            return MendResult("no archive of another ledger was found")
        return MendResult(
            f"{', '.join(now.archives)} may be another ledger's: 'caf run {context.source} "
            "--new-archive' sets them aside if they have other objects",
            Actor.OPERATOR,
        )

    yield mendable(Kind.ACCOUNT, foreign.account, foreign.sentence, "looked again", look_again)


def _file_findings(examination: Examination, file: rebuild.FileFinding) -> Iterator[Finding]:
    if file.from_unknown_post:
        yield _unknown_post(examination, file)
        return
    if file.kind is FileKind.CHUNK:
        members = file.chunk.member_count if file.chunk else 0
        state = f"has it as '{file.replaces.state}'" if file.replaces else "does not"
        problem = (
            f"the store has this chunk of {counted(members, 'member')} ({_place(file)}), and the "
            f"ledger {state}"
        )
        yield mendable(
            Kind.FILE,
            file.name,
            problem,
            _remedy(examination, file),
            partial(_restore, examination, file),
        )
        return
    if file.kind is FileKind.KNOWN:
        yield from _known_chunk(examination, file)
        return
    problem, name = (
        (f"{_place(file)}: {file.why}", file.name) if file.name else (file.why, _place(file))
    )
    if file.kind is FileKind.DIFFERING:
        yield Finding(
            Kind.FILE,
            name,
            problem,
            "not restored; 'caf rebuild --whole' finds the right copies",
            Actor.OPERATOR,
        )
    elif file.kind in _DOUBTFUL:
        yield Finding(Kind.FILE, name, problem, "not restored; check again later", Actor.OPERATOR)
    else:
        yield Finding(Kind.FILE, name, problem, f"left; {_space(examination, file)}", Actor.NOBODY)


def _unknown_post(examination: Examination, file: rebuild.FileFinding) -> Finding:
    context, posting, chunk = examination.context, file.file.posting, file.chunk
    (posted_at,) = context.store.posted_at([posting])
    facts = {
        "merkle_root": posting.merkle_root.hex(),
        "block": posting.start,
        "posted_at": posted_at.isoformat(timespec="seconds"),
        "size_bytes": posting.stored_size_bytes,
    }
    problem = (
        f"{rebuild.NOT_OWN}: {_place(file)}, about {posted_at:%Y-%m-%d %H:%M} UTC, "
        f"{show_size(posting.stored_size_bytes)}"
    )
    add, leave = (f"'caf doctor {context.source} --{word}-unknown-posts'" for word in _ORDERS)
    name, remedy, changes = _place(file), f"{leave} sets it aside", _no_changes
    if chunk is not None:
        name, changes = chunk.name, partial(key_changes, context, file)
        counts = Counter(change.change for change in changes())
        facts["objects"] = chunk.member_count
        problem += (
            f", {counted(chunk.member_count, 'object')}; it would add {counts[Change.NEW]} keys, "
            f"change {counts[Change.CURRENT]}, and add a version to {counts[Change.VERSION]}"
        )
        remedy = f"only {add} adds it, and {remedy}"
    else:
        problem += f"; {file.why}"
    finding = Finding(
        Kind.FILE, name, problem, remedy, Actor.OPERATOR, facts=facts, changes=changes
    )
    if examination.unknown_posts is UnknownPosts.LEAVE:

        def set_aside() -> MendResult:
            roots = [posting.merkle_root]
            context.ledger.rebuilds.leave_posts(context.source, roots, superseded=False)
            return MendResult("set aside")

        return replace(finding, remedy="set aside", actor=Actor.DOCTOR, mend=set_aside)
    if examination.unknown_posts is UnknownPosts.ADD and chunk is not None:
        return replace(
            finding,
            remedy=_remedy(examination, file),
            actor=Actor.DOCTOR,
            mend=partial(_restore, examination, file),
            question=f"Add the objects of {name}? What S3 still has of them is paid for again.",
        )
    return finding


def _no_changes() -> Iterator[KeyChange]:
    return iter(())


def _place(file: rebuild.FileFinding) -> str:
    posting = file.file.posting
    return f"root {posting.merkle_root.hex()[:16]}…, block {posting.start}"


def _space(examination: Examination, file: rebuild.FileFinding) -> str:
    size_bytes = file.file.posting.stored_size_bytes
    if examination.context.settings.store.kind == "jackal":
        return f"each of its copies takes {show_size(size_bytes)} until the bought space ends"
    return f"it takes {show_size(size_bytes)} of the store"


def _known_chunk(examination: Examination, file: rebuild.FileFinding) -> Iterator[Finding]:
    try:
        chunk = examination.context.ledger.chunks.get(file.name)
    except NotLocated:
        return
    is_recorded = (chunk.merkle_root, chunk.start) == (
        file.file.posting.merkle_root,
        file.file.posting.start,
    )
    if chunk.state in CLAIMING:
        if not is_recorded and chunk_lease(chunk.name) not in examination.leases_of_live_runs():
            problem = f"it is posted ({_place(file)}), and the ledger has it as '{chunk.state}'"
            remedy = f"'caf run {chunk.source}' continues it"
            yield Finding(Kind.FILE, chunk.name, problem, remedy, Actor.RUN)
    elif chunk.state not in IN_GOOD_STANDING:
        yield Finding(
            Kind.FILE,
            chunk.name,
            f"posted ({_place(file)}) and {chunk.state}",
            f"left; {_space(examination, file)}",
            Actor.NOBODY,
        )


def _remedy(examination: Examination, file: rebuild.FileFinding) -> str:
    fault = rebuild.fault_of(examination.context, file.chunk) if file.chunk else ""
    return (
        f"restored as damaged ({fault}); 'caf repair {file.name}' stores it again"
        if fault
        else "restored"
    )


def _restore(examination: Examination, file: rebuild.FileFinding) -> MendResult:
    context = examination.context
    with examination.lease(plan_lease(context.source)):
        if file.replaces is None:
            with suppress(NotLocated):
                context.ledger.chunks.get(file.name)
                return ALREADY_GONE
        else:
            examination.require_free(chunk_lease(file.name))
        try:
            is_ordered = examination.unknown_posts is UnknownPosts.ADD
            rows = rebuild.import_found_chunk(context, file, unknown_posts=is_ordered)
        except (ArchiveError, ClaimConflict, IllegalMove, IntegrityError) as error:
            return MendResult(f"not restored: {with_hint(error)}", Actor.OPERATOR)
        if not rows:
            return MendResult(
                f"left: {rebuild.ELSEWHERE}; {_space(examination, file)}", Actor.NOBODY
            )
        remedy = _remedy(examination, file)
        return MendResult(
            f"{remedy}, with {counted(rows, 'location')}",
            Actor.MENDED if remedy == "restored" else Actor.OPERATOR,
        )
