"""Metadata on the pages of assets."""

from itertools import pairwise

from caf_pipeline.defs import metadata
from caf_pipeline.inventory.plan_statistics import SizeStep
from caf_pipeline.records import Copy

ADDRESS = "jkl1" + "q" * 33 + "end45"
PROOF = f"{ADDRESS}/{'ab' * 32}/{ADDRESS}/123456"


def test_the_provider_table_shortens_addresses_and_lists_them_fully():
    shown = metadata.providers([Copy(ADDRESS, PROOF, 7)], fault=("string", ["none"]))
    (record,) = shown["providers"].records
    assert record.data == {
        "provider": "jkl1qqqqqq…qqqqqend45",
        "last_proven_height": 7,
        "fault": "none",
    }
    assert shown["provider_addresses"].value == [ADDRESS]


def test_the_largest_histogram_fits_the_limit_of_the_ui():
    # Empty objects, up to 1 KiB, and so on to 64 TiB; S3's largest object has 50 TB.
    edges = [0, 1, *(1 << bits for bits in range(10, 48, 2))]
    sizes = [SizeStep(low, high, 225_000_000, 999 << 30) for low, high in pairwise(edges)]
    assert len(metadata.histogram_metadata(sizes).value) < 1_000


def test_hashes_are_shortened_and_addresses_are_not():
    assert (
        metadata.shorten_hashes(f"no file {'4f' * 32}: {ADDRESS}")
        == f"no file 4f4f4f4f…: {ADDRESS}"
    )
