"""The sample of a sweep that `make test` runs; `make test-all` runs the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], *, every: int) -> list[Any]:
    """Return a sweep's parameters, all but the middle one of each `every` marked as thorough."""
    return [
        value if number % every == every // 2 else pytest.param(value, marks=pytest.mark.thorough)
        for number, value in enumerate(values)
    ]
