"""What `make test` leaves to `make test-all`, of a sweep: all but a sample."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], *, every: int) -> list[Any]:
    """Return a sweep's parameters, all but one in so many marked as thorough; the middle of each so
    many stays.
    """
    return [
        value if number % every == every // 2 else pytest.param(value, marks=pytest.mark.thorough)
        for number, value in enumerate(values)
    ]
