"""`caf queue` escapes what a stranger sent, and removes only what it showed."""

import json

import pytest

from caf_pipeline.source.protocol import ObjectEvent, QueueMessage
from caf_pipeline_tests.support.command_line import CommandLine, source_text


@pytest.fixture
def caf(tmp_path, database_url, ledger):
    caf = CommandLine(tmp_path, {"CAF_DATABASE_URL": database_url})
    caf.settings(source_text("http://127.0.0.1:1", "b"))
    return caf


def test_messages_are_shown_with_their_reasons_and_removed_on_demand(caf, ledger):
    assert caf("queue", "src").out == b"no message set apart\n"
    ledger.sources.register("src", "address")
    hostile = QueueMessage(
        "id-1", "", b"\x1b[2J\xff\n", [ObjectEvent(b"key", "")], "it is not JSON"
    )
    assert ledger.notices.take_messages("src", [hostile]) == {"id-1"}
    text = caf("queue", "src").out.decode()
    assert "JSON\n  \\x1b[2J" in text
    assert text.endswith("1 message set apart\n")
    status = caf("status").out.decode()
    assert "1 key" in status
    assert "1 message" in status
    status = json.loads(caf("status", "--json").out.splitlines()[0])
    assert (status["noticed_keys"], status["messages_set_apart"]) == (1, 1)
    assert json.loads(caf("queue", "src", "--json").out)["body"] == "\x1b[2J\\xff\n"
    assert caf("queue", "src", "--remove").out.endswith(b"1 message removed\n")
    assert caf("queue", "src").out == b"no message set apart\n"
