"""The chain listing: suspect chunks, incomplete lists, and the requests of a pass."""

import base64
import hashlib
import os
from dataclasses import replace

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import StoreUnreachable
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import chunk_lease, lists_lease
from caf_pipeline.maintenance import chain_listing
from caf_pipeline.maintenance.chain_listing import check_chain_listing
from caf_pipeline.maintenance.doctor.examine import examine
from caf_pipeline.maintenance.scrub import prove_chunk, prove_oldest
from caf_pipeline.steps import chunk_steps
from caf_pipeline.store.jackal.names import archive_note
from caf_pipeline.system.processes import this_process
from caf_pipeline_tests.support.jackal_stores import open_jackal_store
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    archive_chunk,
    archive_everything,
    plan,
)
from caf_pipeline_tests.support.scripted_lcd import CHAIN_ID, ScriptedAnswer, ScriptedLcd
from caf_pipeline_tests.support.several_folders import SeveralFolders

pytestmark = pytest.mark.thorough

LOCATED = """
    WITH plan AS (INSERT INTO plans (source_id, name, sha256, snapshot, folder, object_count,
        object_bytes)
        SELECT source_id, '00000000', '', 's', 'f', 1, 1 FROM sources WHERE name = 'src' RETURNING
            *),
    files AS (INSERT INTO caf_files (name, source_id, plan_id, number, state, object_count,
        object_bytes, expected_size_bytes,
        located_at, sealed_at)
        SELECT 'src-00000000-' || to_char(number, 'fm000000'), source_id, plan_id, number,
            'located', 1, 1, 1000, now(), now()
        FROM plan, generate_series(1, %(count)s) AS number RETURNING caf_file_id, number),
    copies AS (INSERT INTO chunk_copies (caf_file_id, store, state, merkle_root, proof_type, owner,
        start, posted_at, verified_at)
        SELECT caf_file_id, 'jackal', 'verified', sha256(CAST(number::text AS bytea)), 0,
            'jkl1owner', 1, now(), now() FROM files)
    INSERT INTO replicas (caf_file_id, store, provider, proof)
    SELECT caf_file_id, 'jackal', provider, '' FROM files, unnest(CAST(%(providers)s AS text[])) AS
        provider
"""
PROVIDERS = ["jkl1anna", "jkl1bert", "jkl1carl"]


@pytest.fixture
def store(tmp_path):
    store = SeveralFolders(tmp_path / "several")
    store.height = 1000
    return store


@pytest.fixture
def context(tmp_path, ledger, store):
    source = MemorySource({f"key-{number:03d}": os.urandom(40_000) for number in range(80)})
    return a_run_context(tmp_path, source, ledger, store=store)


@pytest.fixture
def names(context):
    return archive_everything(context)


def posting(context, name):
    return chunk_steps.posting_of(context.ledger.chunks.get(name))


def make_due(database):
    with connected(database) as connection:
        connection.execute("UPDATE chain_listings SET next_at = now()")


def suspected(context):
    return sorted(chunk.name for chunk in context.ledger.chunks.suspected(context.source, 10**6))


def states(context):
    return {chunk.state for chunk in context.ledger.chunks.list(context.source)}


# --- what is suspected
# ------------------------------------------------------------------------------------------


def test_sound_chunks_are_looked_at_and_none_is_suspected(context, names):
    found = check_chain_listing(context)
    assert (found.chunks, found.listed, found.copies) == (len(names), len(names), 3 * len(names))
    assert (found.suspected, found.trouble, found.left_out, suspected(context)) == (
        set(),
        "",
        [],
        [],
    )
    assert context.ledger.chain_listings.suspicions(context.store.name, "src") == (found.began, 0)


def test_unlisted_chunk_is_looked_at_first_and_damaged(context, store, names):
    for _ in prove_oldest(context, 9):
        pass  # the last chunk was looked at last
    store.forget(posting(context, names[-1]))
    check_chain_listing(context)
    assert (suspected(context), states(context)) == ([names[-1]], {ChunkState.LOCATED})
    (report,) = prove_oldest(context, 1)
    assert (report.chunk.name, report.chunk.state) == (names[-1], ChunkState.DAMAGED)
    assert suspected(context) == []


def test_lost_copy_makes_a_chunk_suspect(context, store, names):
    store.required_copies = 2
    store.unlisted = {"bert"}
    check_chain_listing(context)
    assert suspected(context) == sorted(names)
    assert all(report.proven for report in prove_oldest(context, 9))
    assert suspected(context) == []


def test_only_a_stale_proof_makes_a_chunk_suspect(context, store, names, database):
    store.height, store.proven = (
        1050,
        {"bert": 850},
    )  # windows begin with the start, a bit more than 100, and have 100 blocks
    check_chain_listing(context)
    assert suspected(context) == []
    store.proven = {"bert": 750}
    make_due(database)
    check_chain_listing(context)
    assert suspected(context) == sorted(names)
    assert {copy.windows for name in names for copy in context.ledger.replicas.list(name)} == {0}


def test_copy_without_any_proof_makes_a_chunk_suspect(context, store, names):
    whole, lacking = store.proof_pages, posting(context, names[0]).merkle_root

    def without(provider):
        pages = ([one for one in page if one.merkle_root != lacking] for page in whole(provider))
        return pages if provider == "bert" else whole(provider)

    store.proof_pages = without
    assert check_chain_listing(context).copies == 3 * len(names) - 1
    assert suspected(context) == names[:1]


def test_complete_later_listing_clears_suspicion(context, store, names, database):
    posts, store.posts = store.posts, {}  # a node that lists nothing
    found = check_chain_listing(context)
    assert (found.suspected_chunks, suspected(context), states(context)) == (
        len(names),
        sorted(names),
        {ChunkState.LOCATED},
    )
    store.posts = posts
    assert next(prove_oldest(context, 1)).proven  # only the look finds the truth
    make_due(database)
    check_chain_listing(context)
    assert suspected(context) == []


# --- what the list cannot do
# -----------------------------------------------------------------------------------------


def test_broken_listing_makes_no_chunk_suspect(context, store, names, database):
    whole = store.file_pages

    def broken(archive_id):
        yield next(whole(archive_id))
        raise StoreUnreachable("no node")

    store.file_pages = broken
    store.unlisted = {"bert"}  # nor do the pages that were read
    found = check_chain_listing(context)
    assert (found.trouble, suspected(context)) == ("no node", [])
    assert "no node" in found.described()
    assert context.ledger.chain_listings.suspicions(context.store.name, "src") == (None, 0)
    store.unlisted = set()
    assert len(list(prove_oldest(context, 9))) == len(names)
    # Other sources must not repeat the failed pass.
    assert check_chain_listing(context) is None


def test_broken_proofs_keep_the_result_of_the_files(context, store, names):
    store.forget(posting(context, names[0]))

    def broken(provider):
        raise StoreUnreachable("no node")

    store.proof_pages = broken
    assert check_chain_listing(context).trouble
    assert suspected(context) == names[:1]


def test_chunk_located_during_the_listing_is_not_suspect(context, store):
    first, second, third = [chunk.name for chunk in plan(context).chunks][:3]
    archive_chunk(context, first)
    archive_chunk(context, second)
    whole = store.file_pages

    def meanwhile(archive_id):
        pages = list(whole(archive_id))
        archive_chunk(context, third)
        prove_chunk(context, first)
        store.unlisted = {"bert"}
        return iter(
            [[replace(file, providers=["anna", "carl"]) for file in page] for page in pages]
        )

    store.file_pages = meanwhile
    check_chain_listing(context)
    assert suspected(context) == [second]


def test_pages_beyond_the_limit_are_reported(context, store, names, monkeypatch):
    monkeypatch.setattr(chain_listing, "PROVIDER_PAGES", 1)
    found = check_chain_listing(context)
    assert found.left_out == [
        f"proofs of {provider} after 1 page" for provider in ("anna", "bert", "carl")
    ]
    assert suspected(context) == []  # nothing is missing among unread entries
    assert context.ledger.chain_listings.suspicions(context.store.name, "src") == (None, 0)


def test_truncated_file_listing_proves_no_absence(context, store, names, database, monkeypatch):
    monkeypatch.setattr(chain_listing, "FILE_PAGES", 1)
    found = check_chain_listing(context)
    assert (found.listed, found.suspected, found.left_out) == (1, set(), ["files after 1 page"])


def test_a_store_without_lists_has_no_pass(context, store, names):
    store.height = None
    assert check_chain_listing(context) is None
    assert suspected(context) == []


# --- many runs
# ------------------------------------------------------------------------------------------


def test_one_listing_an_hour_serves_all_sources(context, store, names, database):
    store.forget(posting(context, names[0]))
    check_chain_listing(context)
    other = replace(context, source="another", holder=this_process("run-2"))
    assert check_chain_listing(other) is None
    assert suspected(context) == names[:1]
    with connected(database) as connection:
        minutes = "SELECT extract(epoch FROM next_at - now()) / 60 FROM chain_listings"
        assert 45 < connection.execute(minutes).scalar_one() <= 50
    make_due(database)
    assert context.ledger.chain_listings.begin(
        store.name, chain_listing.RETRY_SECONDS
    )  # its process dies
    assert check_chain_listing(other) is None
    make_due(database)
    assert check_chain_listing(other).chunks == len(names)
    with connected(database) as connection:  # written while the clock was a year ahead
        connection.execute("UPDATE chain_listings SET next_at = next_at + interval '1 year'")
    assert check_chain_listing(other).chunks == len(names)


def test_no_pass_begins_beside_one_that_takes_long(tmp_path, database, store):
    ledger = Ledger(database, lease_seconds=1.5)
    context = a_run_context(tmp_path, MemorySource({"a": b"a"}), ledger, store=store)
    archive_everything(context)
    with ledger.leases.hold(lists_lease(store.name), this_process("run-2")):
        assert check_chain_listing(context) is None


def test_unavailable_suspects_do_not_block_other_chunks(context, store, names):
    unanswered, gone, *others = names
    assert len(others) >= 2
    asked, root = store.read, posting(context, unanswered).merkle_root

    def read(at, *arguments, **named):
        if at.merkle_root == root:
            raise StoreUnreachable("nobody answers")
        return asked(at, *arguments, **named)

    store.read = read
    posts, store.posts = store.posts, {}
    check_chain_listing(context)
    store.posts = posts
    store.forget(posting(context, gone))
    seen = []
    with pytest.raises(StoreUnreachable):
        seen.extend(report.chunk.name for report in prove_oldest(context, 2))
    assert states(context) == {ChunkState.LOCATED, ChunkState.DAMAGED}
    assert unanswered in suspected(context)
    assert gone not in suspected(context)


def test_a_quarter_of_looks_is_for_other_chunks(context, store, names, ledger, database):
    first, *others = names
    began, _ = ledger.chain_listings.located_copies()
    ledger.chain_listings.suspect(began, [ledger.chunks.get(name).caf_file_id for name in others])
    assert len(others) >= 3
    with ledger.leases.hold(chunk_lease(first), this_process("run-0")):
        pass
    assert {report.chunk.name for report in prove_oldest(context, 4)} >= {first}


# --- on Jackal
# ------------------------------------------------------------------------------------------


class ListingNode(ScriptedLcd):
    """A node that lists files of the archive in pages, each file with three providers."""

    def __init__(self, archive_id, count):
        super().__init__()
        self.archive_id, self.count = archive_id, count
        self.answers[f"files/note/caf_pipeline/{archive_id}"] = lambda params: self.page(
            params, "files", self.file
        )
        self.answers["params"] = ScriptedAnswer({"params": {"proof_window": "50"}})
        for provider in PROVIDERS:
            self.answers[f"proofs/{provider}"] = lambda params: self.page(
                params, "proofs", self.proof
            )

    def page(self, params, name, entry):
        first = int(base64.b64decode(params["pagination.key"])) if "pagination.key" in params else 1
        end = min(first + int(params["pagination.limit"]), self.count + 1)
        following = base64.b64encode(str(end).encode()).decode() if end <= self.count else None
        return ScriptedAnswer(
            {
                name: [entry(number) for number in range(first, end)],
                "pagination": {"next_key": following},
            }
        )

    @staticmethod
    def place(number):
        root = hashlib.sha256(str(number).encode()).digest()
        return {"merkle": base64.b64encode(root).decode(), "owner": "jkl1owner", "start": "1"}

    def file(self, number):
        proofs = [f"{provider}/jkl1owner/00/1/" for provider in PROVIDERS]
        sizes = {
            "expires": "0",
            "file_size": "1000",
            "proof_interval": "50",
            "proof_type": "3",
            "max_proofs": "3",
        }
        return {
            **self.place(number),
            **sizes,
            "proofs": proofs,
            "note": archive_note(self.archive_id),
        }

    def proof(self, number):
        return {**self.place(number), "last_proven": "90", "chunk_to_prove": "1"}


@pytest.fixture
def on_jackal(tmp_path, ledger, database):
    """Return a source with many located chunks, and a node that lists them."""
    opened = []

    def make(count):
        archive_id = a_run_context(tmp_path, None, ledger).archive_id
        node = ListingNode(archive_id, count)
        jackal = {"lcd": [node.url], "chain_id": CHAIN_ID, "allow_private_addresses": True}
        context = a_run_context(tmp_path, None, ledger, store=open_jackal_store, jackal=jackal)
        opened.extend([context.store.close, node.__exit__])
        with connected(database) as connection:
            connection.execute(LOCATED, {"count": count, "providers": PROVIDERS})
        return context, node

    yield make
    for close in opened:
        close()


@pytest.mark.parametrize(("count", "pages"), [(300, 4), (600, 8)])
def test_requests_grow_with_pages_not_with_chunks(on_jackal, count, pages):
    context, node = on_jackal(count)
    found = check_chain_listing(context)
    assert (found.listed, found.copies, found.suspected, found.pages) == (
        count,
        3 * count,
        set(),
        pages,
    )
    asked = [path for path in node.asked if path.startswith(("files", "proofs"))]
    assert len(asked) == pages
    assert len(node.asked) <= 2 * pages + 5  # the node's height is checked before each page


def test_node_falling_behind_cuts_the_listing_off(on_jackal):
    context, node = on_jackal(600)
    context.store.chain._nodes._attempts = 1
    first = node.answers[f"files/note/caf_pipeline/{node.archive_id}"]

    def falls_behind(params):
        node.height = 50
        return first(params)

    node.answers[f"files/note/caf_pipeline/{node.archive_id}"] = falls_behind
    found = check_chain_listing(context)
    assert "block 50" in found.trouble
    assert suspected(context) == []


def test_doctor_lists_pages_and_asks_for_missing_chunks_alone(
    on_jackal,
):
    context, node = on_jackal(300)
    list(examine(context, alive=lambda holder: True))
    assert [path for path in node.asked if path.startswith("files/") and "note" not in path] == []
    node.count -= 1
    node.asked.clear()
    list(examine(context, alive=lambda holder: True))
    assert {
        path.split("?")[0]
        for path in node.asked
        if "note" not in path and path.startswith("files/")
    } != set()
    assert len(node.asked) < 30
