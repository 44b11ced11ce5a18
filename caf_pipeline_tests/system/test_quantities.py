"""A number and its noun agree, wherever they are said."""

import re
from datetime import timedelta
from pathlib import Path

import pytest

import caf_pipeline
from caf_pipeline.system.quantities import counted, show_age, table_lines

PACKAGE = Path(caf_pipeline.__file__).parent
COUNTED = r"(chunks|objects|files|copies|locations|claims|members|providers|purchases|sources)"


@pytest.mark.parametrize(
    ("count", "noun", "plural", "said"),
    [
        (0, "chunk", "", "0 chunks"),
        (1, "chunk", "", "1 chunk"),
        (2, "chunk", "", "2 chunks"),
        (1, "copy", "copies", "1 copy"),
        (3, "copy", "copies", "3 copies"),
        (10_000, "object", "", "10,000 objects"),
    ],
)
def test_a_number_and_its_noun_agree(count, noun, plural, said):
    assert counted(count, noun, plural) == said


@pytest.mark.parametrize(
    ("age", "shown"),
    [
        (timedelta(seconds=59), "0 minutes ago"),
        (timedelta(minutes=119), "119 minutes ago"),
        (timedelta(hours=2), "2 hours ago"),
        (timedelta(hours=72), "3 days ago"),
    ],
)
def test_ages_are_in_minutes_hours_or_days(age, shown):
    assert show_age(age) == shown


def test_a_table_cuts_no_cell_and_aligns_numbers_right():
    rows = [("demo-1a2b3c4d-00001", "5"), ("x", "1,000")]
    assert [*table_lines(("chunk", "objects"), rows, right=["objects"])] == [
        "chunk                objects",
        "demo-1a2b3c4d-00001        5",
        "x                      1,000",
    ]


@pytest.mark.parametrize(
    "module",
    [
        "cli/status",
        "cli/jackal",
        "cli/doctor",
        "cli/rebuild",
        "dagster_host/run_source",
        "maintenance/doctor/examine",
    ],
)
def test_no_command_puts_a_bare_number_before_a_plural(module):
    text = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    assert re.findall(rf"\{{[^{{}}]*\}} {COUNTED}\b", text) == []
