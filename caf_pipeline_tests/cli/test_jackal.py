"""`caf jackal`: the wallet, prices, purchases, files, limits, proofs and repairs."""

import contextlib
import json
import os
import shutil
import signal
from dataclasses import replace
from datetime import UTC, datetime

import httpx
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    ChainUnreachable,
    LedgerUnreachable,
    NotProven,
    SettingsError,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.maintenance.repair import concerns_one_chunk
from caf_pipeline_tests.support.command_line import (
    CommandLine,
    archive_source,
    expect_error,
    source_text,
)
from caf_pipeline_tests.support.jackal_command_line import (
    NewWallet,
    jackal_command_line,
    new_wallet,
    wallet_with_space,
    with_wallet,
)
from caf_pipeline_tests.support.jackal_network import ADDRESS, SPACE, WORDS
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS, wait_for
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.roles import granted_roles
from caf_pipeline_tests.support.ticks import silent_server

pytest_plugins = ["caf_pipeline_tests.support.jackal_network"]

GB = 10**9
COINS = 10_000_000


@pytest.fixture
def caf(tmp_path, network, database_url) -> CommandLine:
    """A command line whose wallet has coins and space."""
    caf = jackal_command_line(tmp_path, network, WORDS, CAF_DATABASE_URL=database_url)
    caf.settings("")
    return caf


@pytest.fixture
def source(caf, network, s3_server, new_bucket) -> CommandLine:
    """The same with a new wallet and a source `src` of three chunks, not archived."""
    caf = with_wallet(caf, wallet_with_space(network).words)
    for number in range(20):
        new_bucket.put(f"key-{number:02d}", os.urandom(100_000))
    caf.settings(source_text(s3_server, new_bucket.name))
    return caf


@pytest.fixture
def archived(source) -> CommandLine:
    """The same source, archived."""
    archive_source(source)
    return source


def of(done) -> dict[str, object]:
    """Parse the one JSON object that a command printed."""
    assert done.status == 0, done.err
    return json.loads(done.out)


def funded(network, coins: int = COINS):
    wallet = new_wallet()
    network.fund(wallet.address, coins)
    return wallet


@pytest.mark.thorough
def test_reading_needs_neither_a_wallet_nor_a_right_to_write(archived, database_url):
    with granted_roles(database_url) as url_as:
        reader = replace(
            archived,
            environment=archived.environment
            | {"JACKAL_MNEMONIC": "", "CAF_DATABASE_URL": url_as("caf_reader")},
        )
        done = reader("get", "src", "key-00")
        assert (done.status, len(done.out)) == (0, 100_000), done.err
        for command in (
            ("check", "src"),
            ("restore", "src", "restored"),
            ("ls", "src", ""),
            ("status",),
        ):
            done = reader(*command)
            assert done.status == 0, (command, done.err)


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["get src key-00", "check src --full", "restore src restored"])
def test_reading_from_private_addresses_needs_the_setting(archived, command):
    done = archived(*command.split(), CAF_JACKAL__ALLOW_PRIVATE_ADDRESSES="false")
    assert done.status == SettingsError.exit_code, done.err
    hints = [line for line in done.err.splitlines() if "hint:" in line]
    assert "jackal.allow_private_addresses = true" in hints[0]
    assert "try again later" not in done.err


@pytest.mark.thorough
def test_an_interrupted_read_does_not_wait_for_a_silent_chain(archived):
    with silent_server() as chain:
        reading = archived.start("get", "src", "key-00", CAF_JACKAL__LCD=json.dumps([chain.url]))
        wait_for(lambda: len(chain.asked) >= 2, reading)  # the file, and the providers
        requests = len(chain.asked)
        reading.send_signal(signal.SIGINT)
        _, errors = reading.communicate(timeout=PATIENCE_SECONDS)
        assert (reading.returncode, b"Traceback" in errors) == (130, False)
        assert len(chain.asked) == requests  # no retry


# --- the wallet and its space


def test_the_account_shows_address_coins_and_space(caf):
    shown = of(caf("jackal", "wallet", "--json"))
    assert (shown["address"], shown["chain_id"], shown["spent_ujkl"]) == (ADDRESS, "loopback-1", 0)
    assert shown["balance_ujkl"] > 0
    assert shown["plan"]["free_bytes"] == shown["plan"]["space_bytes"] - shown["plan"]["used_bytes"]
    assert ADDRESS in caf("jackal", "wallet").out.decode()


def test_an_empty_wallet_is_shown_as_such(caf):
    wallet = new_wallet()
    shown = of(with_wallet(caf, wallet.words)("jackal", "wallet", "--json"))
    assert (shown["address"], shown["balance_ujkl"], shown["plan"]) == (wallet.address, 0, None)
    assert "none bought" in with_wallet(caf, wallet.words)("jackal", "wallet").out.decode()


def test_a_wrong_mnemonic_is_refused_without_printing_it(caf):
    done = with_wallet(caf, WORDS.replace("about", "zebra"))("jackal", "wallet")
    expect_error(done, 3, "mnemonic")
    assert not {"abandon", "zebra"} & set(done.err.split())


def test_a_missing_wallet_error_names_the_settings(caf):
    expect_error(with_wallet(caf, "")("jackal", "wallet"), 3, "JACKAL_MNEMONIC")


def test_the_wallet_shows_used_and_unused_words(caf, tmp_path):
    file = tmp_path / "words"
    file.write_text(WORDS)
    file.chmod(0o600)
    shown = of(caf("jackal", "wallet", "--json"))
    assert (shown["words_from"], shown["words_not_used"]) == ("JACKAL_MNEMONIC", [])
    both = {"CAF_JACKAL__MNEMONIC_FILE": str(file), "CAF_JACKAL__MNEMONIC": WORDS}
    shown = of(caf("jackal", "wallet", "--json", **both))
    assert (shown["words_from"], shown["words_not_used"]) == (
        "CAF_JACKAL__MNEMONIC",
        ["JACKAL_MNEMONIC", str(file)],
    )
    shown = caf("jackal", "wallet", CAF_JACKAL__MNEMONIC_FILE=str(file)).out.decode()
    assert f"words      from JACKAL_MNEMONIC; not used: {file}\n" in shown
    shown = caf(
        "jackal", "wallet", JACKAL_MNEMONIC="", CAF_JACKAL__MNEMONIC_FILE=str(file)
    ).out.decode()
    assert f"words      from {file}\n" in shown


# --- prices and purchases


def test_a_price_counts_every_copy(caf):
    shown = of(caf("jackal", "price", "2GB", "--days", "60", "--json"))
    assert (shown["copies"], shown["charged_bytes"], shown["days"]) == (3, 6 * GB, 60)
    assert (shown["price_ujkl"], shown["price_usd"]) == (300_000, pytest.approx(0.06))
    assert shown["missing_bytes"] == 0
    assert "every 60 days" in caf("jackal", "price", "2GB", "--days", "60").out.decode()


@pytest.mark.thorough
def test_a_price_below_the_minimum_names_the_priced_size(source):
    least = "1,000,000,000 bytes, the least that is sold"
    assert f" for 30 days of {least}\n" in source("jackal", "price", "300MB").out.decode()
    assert least not in source("jackal", "price", "400MB").out.decode()
    assert (
        f" for 30 days of {least}, and at most " in source("plan", "src", "--dry-run").out.decode()
    )


@pytest.mark.thorough
def test_the_price_of_a_source_covers_its_plan(source):
    expect_error(source("jackal", "price", "src"), 11, "no whole inventory")
    source("run", CAF_STAGING="/dev/null/nowhere")
    shown = of(source("jackal", "price", "src", "--json"))
    assert shown["size_bytes"] > 2_000_000
    assert shown["charged_bytes"] == 3 * shown["size_bytes"]


@pytest.mark.thorough
def test_an_archived_source_costs_nothing_more(archived):
    assert of(archived("jackal", "price", "src", "--json"))["charged_bytes"] == 0


def test_neither_a_source_nor_a_size_has_no_price(caf):
    expect_error(caf("jackal", "price", "much"), 3, "'much'")


def test_space_is_bought_once_its_price_was_shown(caf, network):
    wallet = funded(network)
    caf = with_wallet(caf, wallet.words)
    done = caf("jackal", "buy", "--bytes", "2GB", "--days", "30", "--yes")
    assert done.status == 0, done.err
    assert "ujkl" in done.err
    shown = of(caf("jackal", "wallet", "--json"))
    assert shown["plan"]["space_bytes"] == 2 * GB
    assert 0 < COINS - shown["balance_ujkl"] <= shown["spent_ujkl"]


def test_nothing_is_bought_without_a_confirmation(caf):
    expect_error(caf("jackal", "buy", "--bytes", "1TB", "--days", "30"), 2, "--yes")


# --- what the chain lists


@pytest.mark.thorough
def test_the_chain_and_the_ledger_name_the_same_files(archived):
    done = archived("jackal", "files", "src", "--json")
    assert done.status == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert lines
    assert not any(
        line["missing"] or line["foreign"] or line["short"] or line["expiring"] for line in lines
    )
    assert all(len(line["providers"]) == 3 for line in lines)
    assert "0 missing" in archived("jackal", "files").out.decode()


@pytest.mark.thorough
def test_files_are_listed_only_at_their_providers(archived, network):
    urls = dict(zip(network.provider_addresses, network.providers, strict=True))
    done = archived("jackal", "files", "src", "--json")
    for line in map(json.loads, done.out.splitlines()):
        assert len(line["downloads"]) == 3 < len(urls)
        assert line["downloads"] == [
            f"{urls[provider]}/download/{line['merkle_root']}" for provider in line["providers"]
        ]
        for url in line["downloads"]:
            assert httpx.get(url, headers={"Range": "bytes=0-0"}).is_success


@pytest.mark.thorough
def test_a_chunk_that_the_chain_does_not_list_is_missing(archived, ledger, database):

    with connected(database) as connection:
        chunk = "(SELECT caf_file_id FROM caf_files WHERE number = 1)"
        connection.execute(f"UPDATE chunk_copies SET start = start + 1 WHERE caf_file_id = {chunk}")
    done = archived("jackal", "files", "src", "--json")
    expect_error(done, 7, "1 chunk")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line["missing"] for line in lines].count(True) == 1
    assert [line["foreign"] for line in lines].count(True) == 1


@pytest.mark.thorough
def test_posted_chunks_keep_their_proof_type(source, ledger):
    assert source("run", CAF_SOURCES__SRC__TARGET_SIZE="32MiB").status == 0
    (chunk,) = ledger.chunks.list()
    assert "proofs     type 3\n" in source("jackal", "wallet").out.decode()
    changed = {"CAF_JACKAL__PROOF_TYPE": "0", "CAF_SOURCES__SRC__TARGET_SIZE": "32MiB"}
    shown = of(source("jackal", "wallet", "--json", **changed))
    assert (shown["proof_type"], shown["posted_by_proof_type"]) == (0, {"3": 1})
    assert "1 chunk posted" in source("jackal", "wallet", **changed).out.decode()
    done = source("run", **changed)
    assert done.status == 0, done.err
    notes = " ".join(done.err.split())
    assert "proof type 0" in notes
    assert "1 chunk" in notes
    assert ledger.chunks.list() == [chunk]
    assert ", 0 missing, " in source("jackal", "files", **changed).out.decode()


# --- orders


def test_limits_are_ordered_lifted_and_taken_back(caf):
    assert of(caf("limit", "--bandwidth", "20MiB/s", "--spend-cap", "5000", "--json")) == {
        "paused": None,
        "bandwidth": 20 << 20,
        "spend_cap": 5000,
    }
    lifted = of(
        caf(
            "limit",
            "--bandwidth",
            "none",
            "--spend-cap",
            "none",
            "--json",
            CAF_JACKAL__SPEND_CAP="7",
        )
    )
    assert (lifted["bandwidth"], lifted["spend_cap"]) == (None, None)
    back = caf("limit", "--spend-cap", "default", "--json", CAF_JACKAL__SPEND_CAP="7")
    assert of(back)["spend_cap"] == 7


# --- proofs and repairs


@pytest.mark.thorough
def test_small_chunks_are_right_and_never_called_proven(caf, s3_server, new_bucket):
    new_bucket.put("tiny", b"tiny")
    caf.settings(source_text(s3_server, new_bucket.name))
    assert caf("run").status == 0
    done = caf("prove", "src")
    assert (done.status, b"1 too small for proofs" in done.out) == (0, True)
    assert "proven" not in done.out.decode() + done.err
    shown = json.loads(caf("prove", "src", "--json").out)
    assert (shown["verdict"], shown["proven"], shown["state"]) == ("unverified", False, "located")
    assert {copy["verified"] for copy in shown["copies"]} == {False}


def test_prove_without_located_chunks_proves_nothing(source):
    done = source("prove", "src")
    assert (done.status, "proven" in done.out.decode()) == (0, False)


@pytest.mark.thorough
def test_stored_chunks_are_proven(archived, ledger):
    lines = [json.loads(line) for line in archived("prove", "src", "--json").out.splitlines()]
    assert len(lines) == len(ledger.chunks.list())
    assert all(line["proven"] and len(line["copies"]) == 3 for line in lines)
    assert len(archived("prove", "src", "--limit", "1", "--json").out.splitlines()) == 1


@pytest.mark.thorough
def test_unanswered_and_damaged_chunks_are_never_called_proven(archived, ledger, network):
    first, second, *_ = ledger.chunks.list()
    silent = network.provider_addresses.index(ledger.replicas.list(first.name)[0].provider)
    network.misbehave(provider=silent, refuse=True)
    expect_error(archived("prove", "src"), 7, "unanswered", first.name)
    network.well_behaved()
    network.drop_proofs(second.merkle_root)
    done = archived("prove", "src")
    expect_error(done, 1, "1 damaged", second.name)
    assert "unanswered" not in done.err
    expect_error(archived("prove", "src"), 1, "1 damaged", second.name)


@pytest.mark.thorough
def test_damage_is_found_reported_and_repaired(archived, ledger, network):
    first = ledger.chunks.list()[0]
    holder = ledger.replicas.list(first.name)[0].provider
    network.drop_proofs(first.merkle_root, network.provider_addresses.index(holder))
    expect_error(archived("prove", "src"), 1, first.name)
    assert first.name in archived("status").out.decode()
    shown = [json.loads(line) for line in archived("status", "src", "--json").out.splitlines()]
    (damaged,) = [line for line in shown if line.get("state") == "damaged"]
    assert damaged["reason"]
    done = archived("repair", "src")
    assert done.status == 0, done.err
    assert ledger.chunks.get(first.name).state is ChunkState.LOCATED
    assert archived("prove", "src").status == 0


@pytest.mark.thorough
def test_a_chunk_beyond_repair_keeps_no_other_from_repair(
    archived, ledger, network, new_bucket, tmp_path
):
    lost, short, *_ = sorted(ledger.chunks.list(), key=lambda chunk: chunk.name)
    for number in range(20):
        new_bucket.put(f"key-{number:02d}", b"overwritten")
    shutil.rmtree(tmp_path / ".caf" / "staging")
    for number in range(len(network.providers)):
        with contextlib.suppress(ValueError):  # the provider never had the chunk
            network.delete_blob(number, lost.merkle_root)
    network.drop_proofs(
        short.merkle_root,
        network.provider_addresses.index(ledger.replicas.list(short.name)[0].provider),
    )
    assert archived("prove", "src").status == 1
    done = archived("repair", "src")
    assert done.status != 0
    assert lost.name in done.err
    assert {chunk.name for chunk in ledger.chunks.list(states=[ChunkState.DAMAGED])} == {lost.name}


@pytest.mark.parametrize(
    ("error", "concerns"),
    [
        (StoreUnreachable("a provider is silent"), True),
        (NotProven("one copy of three"), True),
        (StoreError("no copy is left"), True),
        (ChainUnreachable("no node answers"), False),
        (LedgerUnreachable("the database is away"), False),
    ],
)
def test_the_next_chunk_is_repaired_unless_it_would_fail_alike(error, concerns):
    assert concerns_one_chunk(error) is concerns


@pytest.mark.thorough
def test_there_is_nothing_to_repair_in_a_sound_source(archived):
    done = archived("repair", "src")
    assert done.status == 0
    assert (done.out, "'src'" in done.err) == (b"", True)


# --- a run, and what ends it


@pytest.mark.thorough
def test_a_wallet_without_space_ends_the_run_early(source, network, ledger):
    source = with_wallet(source, funded(network).words)
    done = source("run")
    assert done.status == 12
    assert "caf jackal buy" in done.err
    assert sum(chunk.attempts for chunk in ledger.chunks.list()) <= 1


def test_a_purchase_with_an_earlier_end_says_so_first(caf, network):
    caf = with_wallet(caf, funded(network).words)
    assert caf("jackal", "buy", "--bytes", "2GB", "--days", "90", "--yes").status == 0
    assert "end earlier" in caf("jackal", "buy", "--bytes", "4GB", "--days", "60", "--yes").err
    shown = of(caf("jackal", "wallet", "--json"))
    assert (shown["latest_end"], shown["warning"]) == (shown["plan"]["ends_at"], None)


def test_the_wallet_names_the_purchase_before_its_space_ends(source, network):
    wallet = funded(network)
    caf = with_wallet(source, wallet.words)
    assert caf("jackal", "buy", "--bytes", "2GB", "--days", "30", "--yes").status == 0
    assert of(caf("jackal", "wallet", "--json"))["warning"] is None
    network.grant(wallet.address, 2 * GB, days=30, days_ago=100)
    shown = caf("jackal", "wallet", CAF_JACKAL__WARN_DAYS="40").out.decode()
    assert "--bytes 2000000000 --days 80" in shown
    account = of(caf("status", "--json"))["space"]
    assert any(row["space_bytes"] == 2 * GB and row["balance_ujkl"] < COINS for row in account)


@pytest.mark.thorough
def test_the_preview_prices_plan_and_archive_in_money(source, new_bucket):
    text = source("plan", "src").out.decode()
    assert "25,000 ujkl (0.03 JKL), at most 0.01 USD, for 30 days" in text
    assert "every 30 days" in text
    assert "archive   " not in text
    archive_source(source)
    new_bucket.put("new", b"1")
    text = source("plan", "src").out.decode()
    assert " MiB with the source's other chunks: 25,000 ujkl" in text
    shown = of(source("plan", "src", "--json"))
    assert (shown["storage_usd"], shown["archive_usd"]) == (0.005, 0.005)
    assert shown["archive_bytes"] > 3 * 2_000_000 > shown["charged_bytes"]
    text = source("plan", "src", CAF_JACKAL__LCD='["http://127.0.0.1:1"]').out.decode()
    assert "storage   not known" in text
    assert "USD" not in text


def test_status_shows_when_the_space_ends_and_the_balance(source, network):
    wallet = funded(network)
    caf = with_wallet(source, wallet.words)
    assert caf("jackal", "buy", "--bytes", "2GB", "--days", "45", "--yes").status == 0
    wallet_shown = of(caf("jackal", "wallet", "--json"))
    line = next(line for line in caf("status").out.decode().splitlines() if wallet.address in line)
    assert f"ends {wallet_shown['plan']['ends_at'][:10]}" in line
    assert f"balance {wallet_shown['balance_ujkl']:,} ujkl" in line


def test_status_shows_a_wallet_without_space(caf, network, ledger):
    ledger.storage_plans.record(
        f"{network.chain_id}/poor", read_at=datetime.now(UTC), balance=5, plan=None
    )
    (line,) = [line for line in caf("status").out.decode().splitlines() if "/poor: " in line]
    assert line.startswith(network.chain_id)
    assert "balance 5 ujkl" in line


def ending_in(network, days: float, *, days_ago: float = 0) -> NewWallet:
    """Return a wallet whose space was bought some days ago and ends in some days."""
    wallet = funded(network)
    network.grant(wallet.address, SPACE, days=days, days_ago=days_ago)
    return wallet


@pytest.mark.thorough
def test_a_run_warns_before_the_space_ends(source, network, ledger):
    wallet = ending_in(network, 5, days_ago=25)
    caf = with_wallet(source, wallet.words)
    for _ in range(2):  # the second run has nothing to archive
        done = caf("run", "src", "--json")
        (summary,) = json.loads(done.out.splitlines()[-1])["sources"]
        assert (done.status, summary["complete"]) == (0, True)
        assert "in 5.0 days" in summary["space_warning"]
        assert summary["space_warning"] in done.err
    assert "in 5.0 days" in caf("status").out.decode()
    (space,) = json.loads(caf("status", "--json").out.splitlines()[0])["space"]
    assert "in 5.0 days" in space["warning"]
    exported = caf("metrics").out.decode()
    assert f'caf_jackal_plan_end_timestamp_seconds{{account="{network.chain_id}/' in exported


@pytest.mark.thorough
def test_every_command_on_the_chain_records_the_end(archived, ledger, tmp_path):
    damaged = ledger.chunks.list("src")[0].name
    for command in (
        ("run", "src"),
        ("plan", "src"),
        ("prove", "src"),
        ("doctor", "src"),
        ("repair", damaged),
        ("rebuild", "src", "--dry-run"),
        ("jackal", "wallet"),
        ("jackal", "price", "1GB"),
        ("jackal", "files", "src"),
    ):
        with connected(ledger.database) as connection:
            connection.execute("TRUNCATE storage_plans")
        archived(*command)
        assert [bool(row.ends_at) for row in ledger.storage_plans.list()] == [True], command


def test_status_says_when_the_space_was_never_read(source):
    assert "never read" in source("status").out.decode()
    assert of(source("jackal", "wallet", "--json"))
    (line,) = [line for line in source("status").out.decode().splitlines() if "used, ends" in line]
    assert line.endswith((" minute ago", " minutes ago"))
