"""docs/how-to/verify-without-us.md, run by somebody without our software."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from caf_pipeline.formats import age
from caf_pipeline_tests.support.chain_user import ChainUser
from caf_pipeline_tests.support.jackal_command_line import new_wallet
from caf_pipeline_tests.support.ledger_rows import ODD_KEYS
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.run_contexts import archive_everything

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "verify-without-us.md"
THEIRS = ("pyarrow", "blake3", "numpy")
"""Packages that the page installs; nothing else of this environment is available."""

IDENTITY = age.new_identity()


def script():
    """The shell blocks of the page."""
    return "".join(re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Return a folder and an environment whose `python3` has the page's packages only."""
    folder = tmp_path_factory.mktemp("elsewhere")
    packages, programs = folder / "packages", folder / "bin"
    packages.mkdir()
    programs.mkdir()
    for package in THEIRS:
        for path in Path(__import__(package).__file__).parents[1].glob(f"{package}*"):
            (packages / path.name).symlink_to(path)
    python = programs / "python3"
    # -S hides installed packages, and so this project.
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(packages),
        "PYTHONUNBUFFERED": "1",  # each line is written at once, though its reader may have ended
        "LANG": "C.UTF-8",
    }
    return folder, environment


def sh(text, folder, environment, *, may_fail=False):
    """Return the output of a script. `may_fail`: it goes on after a failed command."""
    done = subprocess.run(
        ["sh", "-c" if may_fail else "-ec", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert may_fail or "Traceback" not in done.stderr  # of a file that did not open
    return done.stdout


@pytest.fixture(params=[(0, True), (3, True), (3, False)], ids=["type-0", "type-3", "private"])
def archived(request, ledger, wallet, elsewhere, jackal_context):
    """Return an archive of several chunks with one proof type, and its wallet's address."""
    proof_type, public = request.param
    age_link = elsewhere[0] / "bin" / "age"
    if not public and not age_link.exists():
        age_link.symlink_to(request.getfixturevalue("age_tool"))
    bodies = {f"key-{number}": os.urandom(150_000) for number in range(5)} | {
        key: key.encode() for key in ODD_KEYS
    }
    source = MemorySource(bodies | {"empty": b"", ".caf/manifest.parquet": b"not ours"})
    context = jackal_context(
        source,
        ledger,
        target="512KiB",
        jackal={"mnemonic": wallet.words, "proof_type": proof_type, "proof_seconds": 8},
        public=public,
        encryption={} if public else {"recipients": [str(IDENTITY.recipient)]},
    )
    archive_everything(context)
    return context, wallet.address


def run_page(context, address, elsewhere, folder, *, may_fail=False):
    """Run the page's commands with this network and wallet, and sample every object.

    Returns the lines up to the verdict on everything, and those of the samples.
    """
    folder.mkdir()
    (folder / "identity.txt").write_text(IDENTITY.reveal())
    (lcd, *_) = context.settings.jackal.lcd
    text, changed = re.subn(r"^lcd=\S+", f"lcd={lcd}", script(), flags=re.MULTILINE)
    text, also = re.subn(r"^owner=\S+", f"owner={address}", text, flags=re.MULTILINE)
    text, sampled = re.subn(r'"\$size" 5 ', '"$size" 1000 ', text)
    assert (changed, also, sampled) == (1, 1, 1)
    lines = sh(text, folder, elsewhere[1], may_fail=may_fail).splitlines()
    (verdict,) = [
        number
        for number, line in enumerate(lines)
        if line == "everything is right" or line.endswith("checks FAILED")
    ]
    return lines[: verdict + 1], lines[verdict + 1 :]


def test_nothing_of_this_project_is_there(elsewhere):
    folder, environment = elsewhere
    for module in ("caf_pipeline", "httpx", "dagster"):
        done = subprocess.run(
            ["python3", "-c", f"import {module}"],
            cwd=folder,
            env=environment,
            capture_output=True,
            check=False,
        )
        assert b"ModuleNotFoundError" in done.stderr
    assert "import caf" not in script()


@pytest.mark.thorough
def test_every_object_is_verified_at_every_provider(archived, elsewhere, tmp_path):
    context, address = archived
    lines, samples = run_page(context, address, elsewhere, tmp_path / "visitor")
    assert lines[-1] == "everything is right", [line for line in lines if "right" not in line]
    copies = 3
    is_public = not context.settings.recipients_of("src")
    for key in context.objects.bodies:
        assert sum(line.startswith(f"right {key!a} ") for line in lines) == copies, key
        of_key = [line for line in samples if line.startswith(f"right {key!a} ")]
        assert len(of_key) == copies * is_public, key
    chunks = context.ledger.chunks.list()
    assert len(chunks) > 1
    for chunk in chunks:
        assert lines.count(f"right Merkle root {chunk.merkle_root.hex()}") == copies
    assert not any(line.startswith("WRONG") for line in lines)


@pytest.mark.thorough
def test_a_flipped_byte_of_an_object_is_found(archived, elsewhere, tmp_path, network):
    context, address = archived
    location = context.ledger.lookup.locate("src", "key-3")
    holders = context.store.holders(location.posting)
    network.misbehave(
        provider=network.provider_addresses.index(holders[0]),
        flip_byte=location.row.start_byte + 77,
    )
    visitor = tmp_path / "visitor"
    lines, samples = run_page(context, address, elsewhere, visitor, may_fail=True)
    assert lines[-1].endswith("checks FAILED")
    assert sum(line.startswith("right 'key-3' ") for line in lines) == 2
    assert f"WRONG Merkle root {location.posting.merkle_root.hex()}" in lines
    if not context.settings.recipients_of("src"):
        assert sum(line.startswith("WRONG 'key-3' ") for line in samples) == 1
        failed = f"{location.posting.merkle_root.hex()} at "
        assert sum(line.startswith(failed) and line.endswith("FAILED") for line in samples) == 1


@pytest.mark.thorough
def test_a_stranger_with_the_same_note_is_left_out(archived, elsewhere, tmp_path, network):
    import httpx

    from caf_pipeline.store.jackal.names import archive_note

    context, address = archived
    stranger = new_wallet()
    network.fund(stranger.address, 10**9)
    network.grant(stranger.address, 10**9)
    with httpx.Client() as client:
        post = ChainUser(network, client, stranger.words).post(
            os.urandom(1000), note=archive_note(context.archive_id)
        )
    lines, samples = run_page(context, address, elsewhere, tmp_path / "visitor")
    assert lines[-1] == "everything is right"
    assert not any(post.root.hex() in line for line in [*lines, *samples])
