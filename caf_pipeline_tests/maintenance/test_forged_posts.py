"""A thief has the wallet's words and the public recipients, and posts under the archive's note."""

import itertools
import os
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from caf_pipeline.caf.merkle import merkle_root
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import CafError, StoredAlready
from caf_pipeline.ledger import backup
from caf_pipeline.ledger.records import UNKNOWN_POST, chunk_lease
from caf_pipeline.maintenance import rebuild
from caf_pipeline.maintenance.doctor.findings import Actor, Kind, UnknownPosts
from caf_pipeline.maintenance.doctor.key_changes import Change
from caf_pipeline.maintenance.rebuild import FileKind
from caf_pipeline.records import posting_of
from caf_pipeline.retrieval.listing import list_rows
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.store.jackal.names import archive_note, mac_of
from caf_pipeline.store.protocol import post_mac
from caf_pipeline_tests.support.chain_user import ChainUser
from caf_pipeline_tests.support.doctors import examined, mended
from caf_pipeline_tests.support.forged_chunks import Forgery, a_skip
from caf_pipeline_tests.support.jackal_command_line import wallet_with_space
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import new_ledger  # noqa: F401 - a fixture
from caf_pipeline_tests.support.private_contexts import IDENTITY, RECIPIENT, encrypt
from caf_pipeline_tests.support.run_contexts import (
    archive_chunk,
    archive_everything,
    first_chunk,
    object_bytes,
)

FORGED = b"forged"
_numbers = itertools.count(1)


@pytest.fixture
def open_context(tmp_path, wallet, jackal_context):
    """Open the private source with any ledger, as a machine that has the identity."""
    source = {"bucket": f"stolen-{next(_numbers)}", "target_size": "8MiB"}
    bodies = {f"key-{n}": os.urandom(5_000) for n in range(5)}

    def make(ledger, words=wallet.words, identity=IDENTITY):
        encryption = {"recipients": [RECIPIENT]}
        if identity:
            encryption["identity"] = identity.reveal()
        return jackal_context(
            MemorySource(dict(bodies)),
            ledger,
            folder=tmp_path / "home",
            jackal={"mnemonic": words},
            sources={"src": source},
            encryption=encryption,
        )

    return make


@pytest.fixture
def context(open_context, ledger):
    return open_context(ledger)


def later(row):
    """Give a row of a forged manifest another ETag and a later time than any archived object."""
    row.update(etag="forged", last_modified=datetime.now(UTC) + timedelta(days=300))


@pytest.fixture
def thief(network, wallet, context, tmp_path):
    """Post a forged chunk with the wallet, encrypted to the recipient; return the post."""

    def post(bodies, *, mac=None, key=None, change_row=later, **more):
        path = tmp_path / f"forged-{next(_numbers)}"
        Forgery(context.archive_id, bodies, change_row=change_row, **more).write(path)
        header_sha256 = encrypt(path)
        if key:
            mac = post_mac(
                key,
                archive_id=context.archive_id,
                merkle_root=merkle_root(path, 3),
                stored_size_bytes=path.stat().st_size,
                proof_type=3,
                header_sha256=header_sha256,
            )
        with httpx.Client() as client:
            user = ChainUser(network, client, wallet.words)
            note = archive_note(context.archive_id, header_sha256, mac)
            posted = user.post(path.read_bytes(), note=note)
            for provider in range(3):
                user.upload(posted, provider)
        network.wait_for(
            lambda state: any(
                file["start"] == posted.start and len(file["providers"]) >= 3
                for file in state["files"]
            )
        )
        return posted

    return post


def unknown(context):
    """Return the doctor's findings of unknown posts."""
    return [finding for finding in examined(context) if "block" in finding.facts]


def ordered(context, order=UnknownPosts.ADD):
    """Run the doctor with an order about unknown posts; return the results."""
    return [
        finding.mend().done
        for finding in examined(context, unknown_posts=order)
        if finding.mend and "block" in finding.facts
    ]


def run(context):
    """Plan and archive as `caf run` does."""
    planning.cut_plan(context, inventories.take_inventory(context))
    for chunk in context.ledger.chunks.list("src", [ChunkState.PLANNED]):
        archive_chunk(context, chunk.name)


def own_content_is_returned(context, bodies):
    assert {key: object_bytes(context, key) for key in bodies} == bodies


def test_post_of_a_stolen_wallet_is_not_added(context, thief):
    archive_everything(context)
    posted = thief({"key-0": FORGED, "new": FORGED})
    mended(context)
    (finding,) = unknown(context)
    assert (finding.kind, finding.actor, finding.mend) == (Kind.FILE, Actor.OPERATOR, None)
    assert finding.facts["block"] == posted.start
    assert finding.facts["size_bytes"] == len(posted.content)
    assert datetime.now(UTC) - datetime.fromisoformat(finding.facts["posted_at"]) < timedelta(1)
    assert len(context.ledger.chunks.list("src")) == 1
    own_content_is_returned(context, context.objects.bodies)
    assert context.ledger.lookup.locate("src", "new") is None


def test_keys_that_an_unknown_post_changes_are_listed(context, thief):
    archive_everything(context)
    thief({"key-0": FORGED, "new": FORGED})
    changes = [
        (change.key, change.change) for finding in examined(context) for change in finding.changes()
    ]
    assert changes == [("key-0", Change.VERSION), ("new", Change.NEW)]


def test_copied_mac_of_an_own_post_is_not_believed(context, thief):
    (name,) = archive_everything(context)
    posting = posting_of(context.ledger.chunks.get(name))
    file = context.store.chain.file(posting.merkle_root, posting.owner, posting.start)
    thief({"new": FORGED}, mac=mac_of(file.note))
    mended(context)
    assert len(unknown(context)) == 1
    assert context.ledger.lookup.locate("src", "new") is None


def test_without_an_order_no_way_leads_into_the_ledger(context, thief):
    archive_everything(context)
    thief({"new": FORGED})
    (finding,) = [file for file in rebuild.find_chunks(context) if file.kind is FileKind.CHUNK]
    with pytest.raises(CafError, match="MAC"):
        rebuild.import_found_chunk(context, finding)
    questions = []
    kinds = [outcome.finding.kind for outcome in rebuild.rebuild(context, ask=questions.append)]
    assert sorted(kinds) == [FileKind.KNOWN, FileKind.UNKNOWN_POST]
    assert questions == []
    assert context.ledger.lookup.locate("src", "new") is None


def test_added_forgery_never_supersedes_own_content(context, thief):
    archive_everything(context)
    bodies = dict(context.objects.bodies)
    thief({"key-0": FORGED, "new": FORGED})
    assert len(ordered(context)) == 1
    own_content_is_returned(context, bodies)
    listed = {row.key: row.status for row in list_rows(context.ledger.lookup, "src")}
    assert listed == dict.fromkeys(bodies, "current") | {"new": UNKNOWN_POST}
    forged = context.ledger.lookup.locate_versions("src", ["key-0"])["key-0"][1]
    assert (forged.status, forged.from_unknown_post) == (UNKNOWN_POST, True)
    assert object_bytes(context, "key-0", forged.row.object_version) == FORGED
    del context.objects.bodies["key-0"]
    context.objects.bodies["key-1"] = b"changed"
    planning.cut_plan(context, inventories.take_inventory(context), new_archive=True)
    own_content_is_returned(context, bodies)  # also what is gone from S3 or has changed there
    noon = datetime.now(UTC) + timedelta(days=400)
    located = context.ledger.lookup.locate("src", "key-0", as_of=noon)
    assert not located.from_unknown_post


def test_same_identity_is_left_out_of_an_added_forgery(context, thief):
    archive_everything(context)
    row = context.ledger.lookup.locate("src", "key-0").row

    def same(changed):
        if changed["key"] == "key-0":
            changed.update(etag=row.etag, last_modified=row.last_modified)

    thief({"key-0": bytes(5_000), "new": FORGED}, change_row=same)
    ordered(context)
    own_content_is_returned(context, context.objects.bodies)
    assert [
        entry.chunk for entry in context.ledger.lookup.locate_versions("src", ["key-0"])["key-0"]
    ] == [context.ledger.lookup.locate("src", "key-0").chunk]


def test_withdrawn_location_is_not_replaced_by_an_unknown_post(context, thief):
    (name,) = archive_everything(context)
    row = context.ledger.lookup.locate("src", "key-0").row
    with context.lease(chunk_lease(name)) as lease:
        context.ledger.moves.move(lease, name, ChunkState.LOCATED, ChunkState.DAMAGED)
        context.ledger.moves.move(lease, name, ChunkState.DAMAGED, ChunkState.WITHDRAWN)

    def same(changed):
        changed.update(etag=row.etag, last_modified=row.last_modified)

    thief({"key-0": bytes(5_000)}, change_row=same)
    ordered(context)
    assert context.ledger.lookup.locate("src", "key-0") is None
    run(context)
    own_content_is_returned(context, context.objects.bodies)


def test_repair_does_not_vouch_for_an_unknown_post(context, thief):
    thief({"new": FORGED})
    ordered(context)
    (chunk,) = context.ledger.chunks.list("src")
    with context.lease(chunk_lease(chunk.name)) as lease:
        stored = chunk_steps.to_store(context, lease, context.ledger.chunks.get(chunk.name))
    assert stored.mac is None


def test_object_of_an_unknown_post_is_archived_and_replaced(context, thief):
    archive_everything(context)
    context.objects.bodies["new"] = body = os.urandom(5_000)
    (listed,) = [entry for entry in context.objects.objects() if entry.key == b"new"]

    def same(changed):
        changed.update(etag=listed.etag, last_modified=listed.last_modified)

    thief({"new": bytes(5_000)}, change_row=same)
    ordered(context)
    assert object_bytes(context, "new") == bytes(5_000)
    run(context)
    location = context.ledger.lookup.locate("src", "new")
    assert (location.status, location.from_unknown_post) == ("current", False)
    assert object_bytes(context, "new") == body
    assert not [finding for finding in examined(context) if finding.kind is Kind.ROWS]
    kinds = {outcome.finding.kind for outcome in rebuild.rebuild(context)}
    assert kinds == {FileKind.KNOWN}


def test_forged_parts_take_no_place_of_a_whole_object(context, thief):
    archive_everything(context)
    row = context.ledger.lookup.locate("src", "key-0").row
    for number in (1, 2):

        def part(changed, number=number):
            changed.update(
                etag=row.etag,
                size_bytes=5_000,
                part=number,
                part_count=2,
                part_start_byte=2_500 * (number - 1),
                part_end_byte=2_500 * number,
                last_modified=datetime.now(UTC) + timedelta(days=1),
            )

        thief({"key-0": bytes(2_500)}, change_row=part, number=number)
    ordered(context)
    own_content_is_returned(context, context.objects.bodies)


def test_forged_skip_keeps_no_object_from_a_plan(context, thief):
    archive_everything(context)
    context.objects.bodies["new"] = b"new"
    (listed,) = [entry for entry in context.objects.objects() if entry.key == b"new"]
    skip = a_skip("new", "too_large", etag=listed.etag, last_modified=listed.last_modified)
    thief(
        {"mine": FORGED},
        skipped=[skip | {"size_bytes": listed.size_bytes}],
        change_row=lambda row: None,
    )
    ordered(context)
    run(context)
    assert object_bytes(context, "new") == b"new"


def test_post_set_aside_stops_nothing_and_stays_out(context, thief):
    archive_everything(context)
    thief({"new": FORGED})
    context.objects.bodies["later"] = b"later"
    with pytest.raises(StoredAlready) as refused:
        run(context)
    assert "--leave-unknown-posts" in refused.value.hint
    assert ordered(context, UnknownPosts.LEAVE) == ["set aside"]
    run(context)
    assert object_bytes(context, "later") == b"later"
    assert unknown(context) == []
    assert [finding.mend for finding in examined(context, UnknownPosts.ADD) if finding.question]
    kinds = {outcome.finding.kind for outcome in rebuild.rebuild(context)}
    assert kinds == {FileKind.KNOWN, FileKind.SUPERSEDED}
    assert context.ledger.lookup.locate("src", "new") is None


def test_post_is_set_aside_without_an_identity(open_context, context, thief):
    archive_everything(context)
    thief({"new": FORGED})
    server = open_context(context.ledger, identity=None)
    (finding,) = unknown(server)
    assert "objects" not in finding.facts
    assert ordered(server, UnknownPosts.LEAVE) == ["set aside"]
    assert unknown(context) == []


def test_forged_name_takes_no_place_of_a_planned_chunk(context, thief):
    name = first_chunk(context)
    thief(
        dict(context.objects.bodies),
        source="src",
        plan=name.split("-")[1],
        number=1,
        change_row=lambda row: None,
    )
    mended(context)
    ordered(context)
    assert context.ledger.chunks.get(name).state is ChunkState.PLANNED


# --- an older backup


@pytest.fixture
def older(context, tmp_path):
    """Return a function that backs the ledger up, and one that restores the backup."""
    programs, path = backup.Programs(context.ledger.database, embedded=True), tmp_path / "a.dump"

    def restore():
        backup.restore(programs, path, reason="a test")
        context.ledger.controls.set("paused", None)

    backup.back_up(context.ledger.database, path, embedded=True)
    return restore


def test_doctor_tells_own_posts_from_forged_after_an_older_backup(context, older, thief):
    archive_everything(context)
    bodies = dict(context.objects.bodies)
    name = context.ledger.chunks.list("src")[0].name
    thief({"key-0": FORGED}, plan=name.split("-")[1], number=int(name.split("-")[2]))
    older()
    assert any("restored, with 5 locations" in done for _, _, done in mended(context))
    assert len(unknown(context)) == 1
    own_content_is_returned(context, bodies)


def test_thief_with_the_key_posts_for_the_ledger(context, thief):
    archive_everything(context)
    thief({"new": FORGED}, key=context.ledger.sources.post_key("src"))
    mended(context)
    assert object_bytes(context, "new") == FORGED


def test_thief_with_the_key_replaces_no_archived_version(context, thief):
    archive_everything(context)
    row = context.ledger.lookup.locate("src", "key-0").row

    def same(changed):
        changed.update(etag=row.etag, last_modified=row.last_modified)

    key = context.ledger.sources.post_key("src")
    thief({"key-0": bytes(5_000), "new": FORGED}, change_row=same, key=key)
    mended(context)
    own_content_is_returned(context, context.objects.bodies)


def test_rebuild_adds_own_posts_of_an_earlier_wallet(open_context, context, older, thief, network):
    archive_everything(context)
    thief({"new": FORGED})
    older()
    changed = open_context(context.ledger, wallet_with_space(network).words)
    assert unknown(changed) == []
    outcomes = list(rebuild.rebuild(changed, owner=context.store.owner()))
    assert {outcome.finding.kind for outcome in outcomes} == {
        FileKind.CHUNK,
        FileKind.UNKNOWN_POST,
    }
    own_content_is_returned(changed, context.objects.bodies)
