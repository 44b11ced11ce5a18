"""The error that a restore ends with."""

import pytest

from caf_pipeline.errors import (
    ChainUnreachable,
    IntegrityError,
    ObjectMissing,
    PrivateAddress,
    RowAltered,
    StoreUnreachable,
)
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.ledger.records import Location
from caf_pipeline.records import PostRecord
from caf_pipeline.retrieval.check import UNREAD_IN_A_ROW
from caf_pipeline.retrieval.restore import (
    RestoredObject,
    RestoreOutcome,
    RestoreSums,
    restore_objects,
)
from caf_pipeline.system.files_below import NotRestored
from caf_pipeline_tests.support.plans import MOMENT

LOCATION = Location(
    LocationRow("key", "v1", "v1", 0, 10, "etag", MOMENT, bytes(32)),
    "src-1-1",
    PostRecord(bytes(64), "owner", 7, 10),
)


class UnreadTarget:
    """Restores nothing, and has an error for each object."""

    def __init__(self, error):
        self._error = error

    def restore(self, listed):
        for location in listed:
            yield RestoredObject(location, RestoreOutcome.FAILED, error=self._error)


@pytest.mark.parametrize("kind", [StoreUnreachable, PrivateAddress, ChainUnreachable])
def test_a_restore_ends_with_the_class_of_its_last_error(kind):
    target = UnreadTarget(kind("away", hint="mend it"))
    with pytest.raises(kind, match=rf"^{UNREAD_IN_A_ROW} objects.*away") as ended:
        list(restore_objects([LOCATION] * 2 * UNREAD_IN_A_ROW, target))
    assert ended.type is kind
    assert ended.value.hint.startswith("mend it; ")
    assert "resumes" in ended.value.hint


@pytest.mark.parametrize("before", [NotRestored, StoreUnreachable])
@pytest.mark.parametrize("ended", [None, StoreUnreachable("the network is away")])
def test_one_integrity_error_outweighs_other_failures(before, ended):
    sums = RestoreSums()
    for error in [*[before("cannot be here")] * 2_000, IntegrityError("other bytes")]:
        sums.add(RestoredObject(LOCATION, RestoreOutcome.FAILED, error=error))
    failure = sums.failure(ended)
    assert isinstance(failure, IntegrityError)
    assert "2,001 objects" in str(failure)


@pytest.mark.parametrize("ended", [None, StoreUnreachable("the network is away")])
def test_only_transient_failures_hint_at_a_retry(ended):
    sums = RestoreSums()
    sums.add(
        RestoredObject(
            LOCATION, RestoreOutcome.FAILED, error=ObjectMissing("no provider has 'key'")
        )
    )
    failure = sums.failure(ended)
    assert (type(failure), failure.exit_code) == (ObjectMissing, 9)
    assert ("resumes" in failure.hint, "caf repair" in failure.hint) == (ended is not None, True)
    sums.add(RestoredObject(LOCATION, RestoreOutcome.FAILED, error=StoreUnreachable("away")))
    assert "resumes" in sums.failure(ended).hint


def test_an_altered_row_is_not_blamed_on_the_store():
    sums = RestoreSums()
    error = RowAltered("the row of 'key' was altered")
    sums.add(RestoredObject(LOCATION, RestoreOutcome.FAILED, error=error))
    assert "caf repair" not in sums.failure(None).hint
    assert "file_locations" in sums.failure(None).hint


def test_hint_covers_failed_and_different_objects():
    sums = RestoreSums()
    sums.add(RestoredObject(LOCATION, RestoreOutcome.FAILED, error=StoreUnreachable("away")))
    resumes = sums.failure(None).hint
    sums.add(RestoredObject(LOCATION, RestoreOutcome.DIFFERENT, "key"))
    assert resumes in sums.failure(None).hint
    assert "--force" in sums.failure(None).hint
