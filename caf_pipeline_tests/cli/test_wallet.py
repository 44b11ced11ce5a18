"""`caf jackal wallet new`: words in a file, an address on standard output."""

import os
import re
import stat

import pytest
from mnemonic import Mnemonic

from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline_tests.support.command_line import CommandLine


@pytest.fixture
def caf(tmp_path):
    return CommandLine(tmp_path, {"CAF_CONFIG": ""})


def test_words_go_to_a_private_file(caf, tmp_path):
    before = os.umask(0)
    try:
        done = caf("jackal", "wallet", "new", "-o", "words")
    finally:
        os.umask(before)
    words = (tmp_path / "words").read_text().strip()
    assert stat.S_IMODE((tmp_path / "words").stat().st_mode) == 0o600
    assert Mnemonic("english").check(words)
    assert len(words.split()) == 24
    assert done.out.decode().strip() == Wallet(words).address
    assert words[:20] not in done.err


def test_printed_lines_are_settings(caf, tmp_path):
    caf.settings('[sources.a]\nbucket = "b"\n')
    done = caf("jackal", "wallet", "new")
    lines = re.findall(r"  (\[jackal\]|mnemonic_file = .*)", done.err)
    caf.settings('[sources.a]\nbucket = "b"\n' + "\n".join(lines))
    assert caf("keys", "show").status == 0
    assert lines == ["[jackal]", 'mnemonic_file = "jackal-wallet"']


def test_two_wallets_differ(caf):
    first, second = (caf("jackal", "wallet", "new", "-o", name).out for name in "ab")
    assert first != second
