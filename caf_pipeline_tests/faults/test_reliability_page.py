"""docs/explanation/reliability.md names exactly the faults of the matrix, with the right counts."""

import json
from collections import Counter
from pathlib import Path

import pytest

from caf_pipeline_tests.faults.matrix import MATRIX
from caf_pipeline_tests.faults.report import faults_of_page, page, read_log

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "reliability.md"
WHOLE = [(group, what) for group, whats in MATRIX.items() for what in whats]


def test_page_names_exactly_the_faults_of_matrix():
    assert list(faults_of_page(PAGE.read_text(encoding="utf-8"))) == WHOLE, (
        "write it again: make reliability"
    )


def test_a_fault_has_one_place_in_the_matrix():
    assert len(set(WHOLE)) == len(WHOLE)


def test_cases_of_a_fault_are_added_up():
    names = ["tried", "survived", "objects", "size_bytes", "lost", "double", "overcharged_bytes"]
    case = {name: number for number, name in enumerate(names)}
    line = json.dumps({"group": "g", "what": "w"} | case)
    assert read_log([line, line]) == {
        ("g", "w"): Counter({name: 2 * number for name, number in case.items()})
    }


def test_a_page_without_all_faults_is_not_written():
    counted = {case: Counter(tried=1, survived=1) for case in WHOLE}
    assert list(faults_of_page(page(counted, form="The short form"))) == WHOLE
    counted.pop(WHOLE[0])
    with pytest.raises(ValueError, match="never tried"):
        page(counted, form="The short form")


@pytest.mark.sample
def test_a_fault_that_is_not_in_the_matrix_is_refused(fault):
    with (
        pytest.raises(AssertionError, match="matrix"),
        fault("A run is killed", "by a name that nobody knows"),
    ):
        pass
