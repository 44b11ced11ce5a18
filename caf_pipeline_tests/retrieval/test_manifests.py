"""Manifests that are fetched once for as many questions as there are, as long as the disk may hold them."""

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace

import pytest

from caf_pipeline.errors import IntegrityError, StoredChunkMissing, StoreUnreachable
from caf_pipeline.retrieval import manifests
from caf_pipeline.retrieval.listing import list_objects
from caf_pipeline.retrieval.manifests import Manifests, manifests_folder
from caf_pipeline.waits import Waits
from caf_pipeline_tests.retrieval.test_object_file import BreakingFolders
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything

BODIES = {name: os.urandom(700_000) for name in "abc"}


@pytest.fixture
def context(tmp_path, ledger):
    """Has a chunk for each object."""
    context = a_run_context(tmp_path, MemorySource(BODIES), ledger, target="1MiB", store=BreakingFolders(tmp_path / "store"))
    archive_everything(context)
    return context


@pytest.fixture
def fetched(context, tmp_path):
    """Asks for the headers of objects, in turn; returns of which a manifest was fetched."""
    (folder := tmp_path / "manifests").mkdir()
    asked = Manifests(context.ledger, context.store, folder)
    located = {one.row.key: one for one in list_objects(context.ledger, "src")}
    assert len({one.chunk for one in located.values()}) == len(BODIES)

    def ask(keys):
        anew = ""
        for key in keys:
            context.store.asked.clear()
            wanted = (key, located[key].row.object_version)
            assert set(asked.headers(located[key].chunk, {wanted})) == {wanted}
            anew += key if context.store.asked else ""
        return anew, sum(path.stat().st_size for path in folder.iterdir())

    return ask


def test_a_manifest_is_fetched_once_for_chunks_whose_objects_take_turns(fetched):
    assert fetched("abcabc")[0] == "abc"


def test_what_was_not_asked_for_longest_makes_room(fetched, monkeypatch):
    _, one = fetched("a")
    monkeypatch.setattr(manifests, "MANIFESTS_BYTES", int(2.5 * one))
    assert fetched("bacab") == ("bcb", pytest.approx(2 * one, rel=0.2))
    monkeypatch.setattr(manifests, "MANIFESTS_BYTES", 1)
    assert fetched("ccac") == ("cac", pytest.approx(one, rel=0.2))


@pytest.fixture(params=["its hash was sealed", "its copies have to agree"])
def headers(request, context, tmp_path, monkeypatch):
    """Asks for the headers of an object, whose chunk was sealed here or rebuilt."""
    located = next(list_objects(context.ledger, "src"))
    if request.param == "its copies have to agree":
        chunk = replace(context.ledger.chunk(located.chunk), tail_start=None, tail_sha256=None)
        monkeypatch.setattr(context.ledger, "chunk", lambda _: chunk)
    (tmp_path / "manifests").mkdir()
    wanted = {(located.row.key, located.row.object_version)}
    return lambda waits=None: Manifests(context.ledger, context.store, tmp_path / "manifests", waits=waits).headers(
        located.chunk, wanted
    )


def test_a_manifest_of_providers_that_are_away_may_be_had_later(context, headers):
    context.store.away.update(context.store.folders)
    assert type(headers()) is StoreUnreachable
    context.store.away.clear()
    assert isinstance(headers(), Mapping)


def test_a_manifest_that_one_provider_has_lost_while_others_are_away_may_be_had_later(context, headers):
    context.store.away.update(("anna", "bert"))
    for file in context.store.folders["carl"].folder.glob("chunks/*"):
        file.write_bytes(bytes(file.stat().st_size))
    assert type(headers()) is StoreUnreachable


def test_a_manifest_that_no_provider_has_and_one_that_all_give_wrong_are_no_matter_of_time(context, headers):
    chunks = [file for folder in context.store.folders.values() for file in folder.folder.glob("chunks/*")]
    for file in chunks:
        file.write_bytes(bytes(file.stat().st_size))
    assert type(headers()) is IntegrityError
    for file in chunks:
        file.unlink()
    assert isinstance(headers(), StoredChunkMissing)


@pytest.mark.parametrize("lying", [["anna"], ["anna", "carl"]])
def test_a_manifest_that_some_providers_give_wrong_is_taken_from_another(context, headers, lying):
    right, told = headers(), []
    waits = Waits(lambda all_of_them: told.extend(wait.what for wait in all_of_them))
    for provider in lying:
        for file in context.store.folders[provider].folder.glob("chunks/*"):
            body = file.read_bytes()
            file.write_bytes(body[:-3000] + bytes(2000) + body[-1000:])
    assert isinstance(right, Mapping)
    assert headers(waits) == right
    if told:  # of the chunk whose copies have to agree
        assert [re.fullmatch(r"all [0-9.]+ KiB of chunk src-.* from (.*)", what)[1] for what in told] == ["anna", "bert"]
        assert isinstance(headers(), IntegrityError)  # a plan reads no chunk whole
    context.store.away.update(set(context.store.folders) - set(lying))
    assert type(headers(waits)) is StoreUnreachable


@pytest.mark.parametrize("moved", [-1, 1])
def test_a_manifest_is_where_the_index_says_that_the_root_proves_and_not_one_that_was_asked_for_alone(
    context, headers, monkeypatch, moved
):
    right, read, lies = headers(), context.store.read, {}
    for file in context.store.folders["anna"].folder.glob("chunks/*"):
        body = file.read_bytes()
        place = re.search(rb'caf/manifest\.parquet":\{"start_byte":(\d+)', body)
        said = str(int(place[1]) + moved).encode()
        assert len(said) == len(place[1])
        lies[file.stem] = body[: place.start(1)] + said + body[place.end(1) :]

    def lie(posting, start_byte, end_byte, *, provider=None):
        if provider == "anna" and start_byte > 0:
            yield lies[posting.merkle_root.hex()][start_byte:end_byte]
        else:
            yield from read(posting, start_byte, end_byte, provider=provider)

    monkeypatch.setattr(context.store, "read", lie)
    assert headers(Waits()) == right


def test_a_manifest_of_which_copies_are_lost_for_good_is_taken_from_the_one_that_is_left(context, headers):
    for provider in ("anna", "bert"):
        for file in context.store.folders[provider].folder.glob("chunks/*"):
            file.unlink()
    assert isinstance(headers(Waits()), Mapping)


def test_what_a_process_that_was_killed_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, file in {"left": "src-1-1.manifest", "mine": "src-1-1.manifest", "mine/below": "note"}.items():
        folder = tmp_path / f"{manifests.FOLDER}{name}"
        folder.mkdir()
        (folder / file).write_bytes(b"")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.manifest").write_bytes(b"")
    (tmp_path / f"{manifests.FOLDER}link").symlink_to(tmp_path / "elsewhere")
    with manifests_folder() as used:
        (used / "src-1-1.manifest").write_bytes(b"")
        with manifests_folder() as other:
            assert other != used
            assert list(used.iterdir())
        assert not other.exists()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "caf-manifests.link",
        "caf-manifests.mine",
        "caf-manifests.mine/below",
        "caf-manifests.mine/below/note",
        "elsewhere",
        "elsewhere/x.manifest",
    ]
