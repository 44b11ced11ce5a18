"""The package and the pages read as easily as psycopg and httpx, counted by the same patterns."""

import re
from pathlib import Path

import pytest

import caf_pipeline
from caf_pipeline_tests.support.prose import faults, read_prose

PACKAGE = Path(caf_pipeline.__file__).parent
ROOT = PACKAGE.parent
PAGES = [ROOT / name for name in ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
GENERATED = {"cli.md", "schema.md", "reliability.md", "benchmarks.md"}


@pytest.mark.parametrize("paths", [[PACKAGE], PAGES], ids=["package", "pages"])
def test_few_sentences_make_readers_stumble(paths):
    prose = read_prose(paths)
    assert prose.sentences > 1000
    assert prose.findings_per_100 <= 3, "\n".join(prose.findings)


def test_names_of_variables_say_what_they_hold():
    names = read_prose([PACKAGE]).unclear_names
    assert len(names) <= 20, "\n".join(names)


def test_no_line_of_the_package_is_longer_than_100_columns():
    lines = [
        (path, re.sub(r"  # (noqa|type): .*", "", line))
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
    ]
    assert len(lines) > 10_000
    assert not [(path, line) for path, line in lines if len(line) > 100]


def test_test_names_have_at_most_ten_words():
    names = [
        name
        for path in Path(__file__).parent.rglob("test_*.py")
        for name in re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)
    ]
    assert len(names) > 1000
    assert not [name for name in names if len(name.split("_")) > 10]


def test_pages_written_by_hand_have_at_most_1500_words():
    pages = [
        page
        for page in (ROOT / "docs").rglob("*.md")
        if page.name not in GENERATED and page.parent.name != "decisions"
    ]
    assert len(pages) > 10
    assert not [page.name for page in pages if len(page.read_text().split()) > 1500]


@pytest.mark.parametrize(
    "sentence",
    [
        "Of a key that is missing, return nothing.",
        "The caller is told of the error.",
        "Return the row, or raise if nobody has it.",
        "Look at the copies where there are some.",
        " ".join(["word"] * 26) + ".",
    ],
)
def test_a_sentence_that_readers_read_twice_is_reported(sentence):
    assert faults(sentence, opens=True)


@pytest.mark.parametrize(
    "sentence",
    ["Return the row of a key.", "Raises LeaseLost if another run holds it.", "What is a chunk?"],
)
def test_a_plain_sentence_is_not_reported(sentence):
    assert not faults(sentence, opens=True)
