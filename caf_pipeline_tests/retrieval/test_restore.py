"""What a restore says at its end of all that became of its objects."""

import pytest

from caf_pipeline.errors import IntegrityError, ObjectMissing, StoreUnreachable
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.restore import RestoredObject, RestoreOutcome, RestoreSums
from caf_pipeline.store.protocol import PostRecord
from caf_pipeline.system.files_below import NotRestored
from caf_pipeline_tests.support.plans import MOMENT

LOCATION = Location(
    LocationRow("key", "v1", "v1", 0, 10, "etag", MOMENT, bytes(32)),
    "src-1-1",
    PostRecord(bytes(64), "owner", 7, 10),
)


@pytest.mark.parametrize("before", [NotRestored, StoreUnreachable])
@pytest.mark.parametrize("ended", [None, StoreUnreachable("the network is away")])
def test_wrong_bytes_of_one_object_are_the_result_however_many_failed_before_it(before, ended):
    sums = RestoreSums()
    for error in [*[before("cannot be here")] * 2_000, IntegrityError("other bytes")]:
        sums.add(RestoredObject(LOCATION, RestoreOutcome.FAILED, error=error))
    failure = sums.failure(ended)
    assert isinstance(failure, IntegrityError)
    assert str(failure) == "2,001 objects of 2,001 could not be restored"


@pytest.mark.parametrize("ended", [None, StoreUnreachable("the network is away")])
def test_only_what_another_try_can_bring_back_goes_on(ended):
    sums = RestoreSums()
    sums.add(
        RestoredObject(
            LOCATION, RestoreOutcome.FAILED, error=ObjectMissing("no provider has 'key'")
        )
    )
    failure = sums.failure(ended)
    assert (type(failure), failure.exit_code) == (ObjectMissing, 9)
    assert ("goes on" in failure.hint, "caf repair" in failure.hint) == (ended is not None, True)
    sums.add(RestoredObject(LOCATION, RestoreOutcome.FAILED, error=StoreUnreachable("away")))
    assert "the same restore goes on" in sums.failure(ended).hint


def test_where_some_failed_and_others_are_different_both_ways_on_are_said():
    sums = RestoreSums()
    sums.add(RestoredObject(LOCATION, RestoreOutcome.FAILED, error=StoreUnreachable("away")))
    goes_on = sums.failure(None).hint
    sums.add(RestoredObject(LOCATION, RestoreOutcome.DIFFERENT, "key"))
    assert sums.failure(None).hint == f"{goes_on}; --force replaces what is different"
