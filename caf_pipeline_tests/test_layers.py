"""Which module may import which, read from the folders."""

import ast

import pytest
from dagster import DagsterInstance

from caf_pipeline import dagster_private
from caf_pipeline_tests.support.package_modules import MODULES, RANK, imports_of, top

ADAPTERS = {"source", "store", "ledger"}
DAGSTER = {"naming", "asset_keys", "dagster_private", "automation", "defs", "dagster_host"}
LEDGER = "ledger.ledger.Ledger"
"""There is one ledger, so that everything above it may name its class."""

BESIDE_WIRING = {
    # who holds a lease, and the database's name in a message
    *("ledger.database.describe_database",),
    "ledger.lookup.Lookup",  # as a type
    # the columns of a table, which a page describes
    "ledger.sql_files.described_columns",
    LEDGER,
    # the commands and pages that are of Jackal alone: types, limits, and what is computed from what
    # the store gave
    *(
        "store.jackal.write.JackalStore",
        "store.jackal.answers.ChainFile",
        "store.jackal.answers.StoragePlan",
    ),
    *(
        "store.jackal.LEAST_BYTES",
        "store.jackal.LEAST_DAYS",
        "store.jackal.wallet.Wallet",
        "store.jackal.wallet.mnemonic_sources",
    ),
    *(
        "store.jackal.wallet.require_address",
        "store.jackal.chain_diff.ChainDiff",
        "store.jackal.chain_diff.compare",
    ),
    *(
        "store.jackal.storage_forecast.StorageForecast",
        "store.jackal.storage_forecast.charged_per_day",
    ),
    *("store.jackal.storage_forecast.forecast_storage", "store.jackal.storage_forecast.to_buy"),
    *("store.jackal.storage_forecast.end_warning", "store.jackal.storage_forecast.space_warning"),
    *("store.jackal.storage_forecast.plan_of", "store.jackal.storage_forecast.warn_period"),
    "store.jackal.storage_forecast.warns_from",
    # Dagster's S3 resource makes the client itself, and `wiring` is given it
    "source.s3.clients.build_client",
    # `caf backup` alone: Postgres' programs for an open ledger
    *("ledger.backup.Programs", "ledger.backup.back_up", "ledger.backup.read_backup"),
    *("ledger.backup.restore", "ledger.database.has_own_server"),
}
"""What is imported from adapters above `wiring`, which opens all else: decision 15."""


@pytest.mark.parametrize("module", [module for module in MODULES if module != "__init__"])
def test_modules_import_only_from_their_own_and_lower_folders(module):
    for name in imports_of(module):
        if name.startswith("caf_pipeline."):
            other = top(name.removeprefix("caf_pipeline."))
            assert other == top(module) or RANK[other] < RANK[top(module)], (
                f"{module} imports {name}"
            )
            assert not (top(module) == "cli" and other in DAGSTER - {"dagster_host"}), (
                f"{module} imports {name}: commands that need Dagster are in `dagster_host`"
            )
            between = (
                RANK["ledger"] < RANK[top(module)] < RANK["wiring"]
                and name != f"caf_pipeline.{LEDGER}"
            )
            assert not (between and other in ADAPTERS), (
                f"{module} imports {name}: only `wiring` opens an adapter"
            )


@pytest.mark.parametrize("module", [module for module in MODULES if top(module) == "cli"])
def test_commands_load_dagster_only_when_they_run(module):
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    loaded = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not [name for name in loaded if name.startswith("caf_pipeline.dagster_host")]


def test_adapters_are_imported_only_by_wiring():
    above = [
        module for module in MODULES if module != "__init__" and RANK[top(module)] > RANK["wiring"]
    ]
    names = {name.removeprefix("caf_pipeline.") for module in above for name in imports_of(module)}
    assert {name for name in names if top(name) in ADAPTERS} == BESIDE_WIRING


IN_A_PROJECT = [
    module
    for module in MODULES
    if top(module) in {"naming", "asset_keys", "automation", "defs", "component"}
]
"""Modules that a user's Dagster project loads."""


@pytest.mark.parametrize("module", IN_A_PROJECT)
def test_projects_load_no_private_module_of_dagster(module):
    assert not [name for name in imports_of(module) if name.startswith("dagster._")]


def members_used(*owners):
    """The attributes of all variables and attributes with these names, in the whole package."""
    return {
        node.attr
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and getattr(node.value, "attr", getattr(node.value, "id", "")) in owners
    }


def test_private_members_of_instances_are_listed():
    used = members_used("instance", "_instance")
    members = {name for name in used if hasattr(DagsterInstance, name)}
    private = {name for name in members if not is_public(getattr(DagsterInstance, name))}
    assert private == set(dagster_private.INSTANCE_MEMBERS)
    assert members_used("event_log_storage", "log") >= set(dagster_private.EVENT_LOG_MEMBERS)
    assert members_used("event_log_storage") <= set(dagster_private.EVENT_LOG_MEMBERS)


def is_public(member):
    return getattr(getattr(member, "fget", member), "_is_public", False)
