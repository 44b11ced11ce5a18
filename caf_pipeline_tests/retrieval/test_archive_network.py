"""The archive opened from settings, on a network: requests, slow providers, and references."""

import asyncio
import hashlib
import os
from collections import Counter

import fsspec
import httpx
import pyarrow.parquet as pq
import pytest

from caf_pipeline.retrieval import archive as archive_module
from caf_pipeline.store.jackal import provider
from caf_pipeline.wiring import open_archive
from caf_pipeline_tests.support.command_line import (
    archive_source,
    expect_error,
    source_text,
)
from caf_pipeline_tests.support.jackal_command_line import jackal_command_line, wallet_with_space
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.s3_server import make_bucket

BODIES = {f"dir/{number:02}": os.urandom(50_000 + number) for number in range(15)} | {
    "dir/empty": b"",
    "a b#ü%41": b"odd",
}


@pytest.fixture(scope="module")
def caf(tmp_path_factory, network, s3_server, databases):
    words = wallet_with_space(network).words
    folder = tmp_path_factory.mktemp("read")
    caf = jackal_command_line(folder, network, words, CAF_DATABASE_URL=databases.take().url)
    bucket = make_bucket(s3_server)
    for key, body in BODIES.items():
        bucket.put(key, body)
    caf.settings(source_text(s3_server, bucket.name))
    archive_source(caf)
    return caf


@pytest.fixture
def archive(caf):
    with caf.surroundings(), open_archive() as archive:
        yield archive


def downloads(network):
    return sum(provider["downloads"] for provider in network.state()["providers"])


def traffic(network, kind):
    return sum(map(Counter, network.traffic()[kind]), Counter())


def test_one_get_makes_five_sequential_round_trips(caf, network):
    lcds, providers = traffic(network, "lcds"), traffic(network, "providers")
    assert caf("get", "src", "dir/03").out == BODIES["dir/03"]
    # Side by side: two connections to a node, each asks for the newest block and then for the file
    # or the providers. Then a connection to a provider, and the bytes.
    assert traffic(network, "lcds") - lcds == {"connections": 2, "requests": 4}
    assert traffic(network, "providers") - providers == {"connections": 1, "requests": 1}


def test_warm_read_is_one_request_on_a_kept_connection(archive, network):
    archive.read("src", "dir/03")
    lcds, providers = traffic(network, "lcds"), traffic(network, "providers")
    for _ in range(12):
        archive.read("src", "dir/03")
    holders = len(archive.store.holders(archive.find("src", "dir/03").location.posting))
    assert traffic(network, "lcds") == lcds
    warm = traffic(network, "providers") - providers
    assert warm["requests"] == 12
    assert warm["connections"] < holders


def test_warm_read_does_not_query_the_database(archive, monkeypatch):
    monkeypatch.setattr(archive_module, "LOOKUP_SECONDS", PATIENCE_SECONDS)
    archive.read("src", "dir/03")
    with monkeypatch.context() as patches:
        patches.setattr(archive.lookup, "_connections", None)
        assert archive.read("src", "dir/03") == BODIES["dir/03"]


@pytest.mark.thorough
def test_providers_that_trickle_are_left_for_one_that_does_not(archive, network, monkeypatch):
    monkeypatch.setattr(provider, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(provider, "MAX_RESUMED", 1)
    posting = archive.find("src", "dir/05").location.posting
    *slow, _ = archive.store.holders(posting)
    for one in slow:
        network.misbehave(provider=network.provider_addresses.index(one), download_rate=1000)
    assert archive.read("src", "dir/05") == BODIES["dir/05"]
    assert {read.key: read.body for read in archive.read_many("src", BODIES)} == BODIES


def test_restore_needs_few_requests_even_with_lying_providers(
    caf, network, archive, new_bucket, tmp_path
):
    def restored(folder):
        before = downloads(network)
        assert caf("restore", "src", str(folder)).status == 0
        assert {key: (folder / key).read_bytes() for key in BODIES} == BODIES
        return downloads(network) - before

    assert restored(tmp_path / "out") == 1
    assert restored(tmp_path / "out") == 0
    before = downloads(network)
    assert (
        caf(
            "restore", "src", f"s3://{new_bucket.name}/", "--endpoint-url", new_bucket.endpoint
        ).status
        == 0
    )
    listed = new_bucket.client.list_objects_v2(Bucket=new_bucket.name)["Contents"]
    assert {
        one["Key"]: new_bucket.client.get_object(Bucket=new_bucket.name, Key=one["Key"])[
            "Body"
        ].read()
        for one in listed
    } == BODIES
    assert downloads(network) - before < len(BODIES) / 2  # including the manifest
    location = archive.find("src", "dir/05").location
    *lying, _ = archive.store.holders(location.posting)
    for one in lying:
        network.misbehave(
            provider=network.provider_addresses.index(one), flip_byte=location.row.start_byte
        )
    # Read with its neighbours, then alone from each provider.
    assert restored(tmp_path / "other") <= 1 + len(lying) + 1


# --- references
# ------------------------------------------------------------------------------------------


def test_fsspec_reads_objects_by_references_without_our_code(caf, network):
    done = caf("export-references", "src", "-o", "all.json")
    assert (done.status, done.out) == (0, b"")
    assert "17 objects" in done.err
    assert "'all.json'" in done.err
    before = downloads(network)
    fs = fsspec.filesystem(
        "reference", fo=str(caf.folder / "all.json"), fs={"http": {}, "https": {}}
    )
    assert fs.cat(list(BODIES)) == BODIES
    assert fs.cat_file("dir/03", 10, 20) == BODIES["dir/03"][10:20]
    with fs.open("dir/04") as file:
        file.seek(-5, os.SEEK_END)
        assert file.read() == BODIES["dir/04"][-5:]
    assert downloads(network) > before


def test_zarr_awaits_objects_by_references_over_http(caf):
    assert caf("export-references", "src", "-o", "zarr.json").status == 0
    fs = fsspec.filesystem(
        "reference",
        fo=str(caf.folder / "zarr.json"),
        asynchronous=True,
        remote_options={"asynchronous": True},
    )

    async def read():
        try:
            return await fs._cat_file("dir/03")
        finally:
            await (await fs.fss["http"].set_session()).close()

    assert asyncio.run(read()) == BODIES["dir/03"]


def test_parquet_references_name_sha256_of_their_objects(caf):
    assert caf("export-references", "src", "dir/", "-o", "dir.parquet").status == 0
    rows = pq.read_table(caf.folder / "dir.parquet").to_pylist()
    assert [row["key"] for row in rows] == [key for key in sorted(BODIES) if key.startswith("dir/")]
    for row in rows:
        assert (row["size"], row["sha256"]) == (
            len(BODIES[row["key"]]),
            hashlib.sha256(BODIES[row["key"]]).digest(),
        )
    last = rows[3]
    got = httpx.get(
        last["path"],
        headers={"Range": f"bytes={last['offset']}-{last['offset'] + last['size'] - 1}"},
    )
    assert (got.status_code, got.content) == (206, BODIES[last["key"]])


@pytest.mark.thorough
def test_references_need_a_provider_that_answers(caf, network, archive):
    posting = archive.find("src", "dir/05").location.posting
    holding = [
        network.provider_addresses.index(provider) for provider in archive.store.holders(posting)
    ]
    for one in holding[:-1]:
        network.misbehave(provider=one, refuse=True)
    assert caf("export-references", "src", "-o", "one.json").status == 0
    assert network.providers[holding[-1]] in (caf.folder / "one.json").read_text()
    network.misbehave(provider=holding[-1], refuse=True)
    expect_error(caf("export-references", "src", "-o", "none.json"), 7, "no copy")
    expect_error(caf("export-references", "src", "-o", "none.txt"), 2, "none.txt")
    expect_error(caf("export-references", "src", "x/", "-o", "none.json"), 11, "begins with 'x/'")
    assert not list(caf.folder.glob("*none*"))
