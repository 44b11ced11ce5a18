"""Keys and prefixes that `caf get` suggests for an unknown key."""

import pytest

from caf_pipeline.errors import NotLocated
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.retrieval import near_keys
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline_tests.support.ledger_rows import SOURCE, archive


@pytest.fixture(scope="module")
def lookup(databases):
    ledger = Ledger(databases.take())
    keys = ["2024.txt", "2024/a.jpg", "2024/b.jpg", "2024/c.jpg", "My Straße/äpfel"]
    archive(ledger, [*keys, *(f"logs/{number:05}" for number in range(101))])
    yield ledger.lookup
    ledger.close()


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("2024/", ["3 ", "'2024/'", "caf restore src 2024/ DIR"]),
        ("2024", ["3 ", "caf restore src 2024/ DIR"]),
        ("/2024/", ["3 ", "caf restore src 2024/ DIR"]),
        ("s3://bucket/2024/", ["3 ", "caf restore src 2024/ DIR"]),
        ("202", ["4 ", "caf restore src 202 DIR"]),
        ("LOGS/", ["more than 100 ", "caf restore src logs/ DIR"]),
        ("my str", ["'My Straße/äpfel'"]),
        ("/2024/a.jpg", ["'2024/a.jpg'"]),
        ("2024/a.jpg/", ["'2024/a.jpg'"]),
        ("s3://bucket/2024/a.jpg", ["'2024/a.jpg'"]),
        ("2024/A.JPG", ["'2024/a.jpg'"]),
        ("mY STRAßE/Äpfel", ["'My Straße/äpfel'"]),
        ("2042/a.jpg", ["'2024/a.jpg'", "caf status"]),
        ("elsewhere", ["caf status"]),
        ("/", ["caf status"]),
        ("", ["caf status"]),
        ("a\udcffb", ["caf status"]),
        ("a\0b", ["caf status"]),
    ],
)
def test_error_for_an_unknown_key_names_similar_keys(lookup, monkeypatch, key, named):
    monkeypatch.setattr(near_keys, "PAGE_ROWS", 100)
    with pytest.raises(NotLocated) as raised:
        fetch(lookup, None, SOURCE, key, suggest=True)
    assert [text for text in named if text not in raised.value.hint] == [], raised.value.hint
