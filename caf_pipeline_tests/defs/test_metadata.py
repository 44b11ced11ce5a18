"""What the pages of assets show: tables that fit, sizes for people beside the exact ones."""

from caf_pipeline.defs import metadata
from caf_pipeline.store.protocol import Copy

ADDRESS = "jkl1" + "q" * 33 + "end45"
PROOF = f"{ADDRESS}/{'ab' * 32}/{ADDRESS}/123456"


def test_a_row_of_the_table_of_providers_fits_its_page_and_the_addresses_stand_beside_it_in_full():
    shown = metadata.providers([Copy(ADDRESS, PROOF, 7)], fault=("string", ["none"]))
    (record,) = shown["providers"].records
    assert record.data == {"provider": "jkl1qqqqqq…qqqqqend45", "last_proven_height": 7, "fault": "none"}
    assert shown["provider_addresses"].value == [ADDRESS]


def test_a_size_for_people_stands_beside_the_exact_one():
    assert metadata.sizes(stored_size_bytes=31_997_000_000) == {"stored_size": "29.8 GiB", "stored_size_bytes": 31_997_000_000}
