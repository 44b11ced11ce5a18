"""Manifests that are fetched once for as many questions as there are, as long as the disk may hold them."""

import os

import pytest

from caf_pipeline.retrieval import manifests
from caf_pipeline.retrieval.listing import list_objects
from caf_pipeline.retrieval.manifests import Manifests
from caf_pipeline_tests.retrieval.test_object_file import BreakingFolders
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.workplaces import a_workplace, archive_everything

BODIES = {name: os.urandom(700_000) for name in "abc"}


@pytest.fixture
def work(tmp_path, ledger):
    """Has a chunk for each object."""
    work = a_workplace(tmp_path, MemorySource(BODIES), ledger, target="1MiB", store=BreakingFolders(tmp_path / "store"))
    archive_everything(work)
    return work


@pytest.fixture
def fetched(work, tmp_path):
    """Asks for the headers of objects, in turn; returns of which a manifest was fetched."""
    (folder := tmp_path / "manifests").mkdir()
    asked = Manifests(work.ledger, work.store, folder)
    located = {one.row.key: one for one in list_objects(work.ledger, "src")}
    assert len({one.chunk for one in located.values()}) == len(BODIES)

    def ask(keys):
        anew = ""
        for key in keys:
            work.store.asked.clear()
            wanted = (key, located[key].row.object_version)
            assert set(asked.headers(located[key].chunk, {wanted})) == {wanted}
            anew += key if work.store.asked else ""
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
