"""Partitions without a chunk, if Dagster's state is in a database."""

import pytest

from caf_pipeline.dagster_host.partition_findings import partition_findings
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.dagster_host.storage import URL_VARIABLE
from caf_pipeline.dagster_host.team_project import HOME_VARIABLE
from caf_pipeline.settings import Settings


@pytest.mark.thorough
def test_partitions_of_another_machine_are_found_in_the_database(
    tmp_path, ledger, empty_database_url, monkeypatch
):
    monkeypatch.setenv(HOME_VARIABLE, "to be put back")
    monkeypatch.setenv(URL_VARIABLE, empty_database_url)
    with open_instance(Settings(home=tmp_path / "other-machine")) as instance:
        instance.add_dynamic_partitions("caf_src_chunks", ["by-hand"])
    findings = partition_findings("src", settings=Settings(home=tmp_path / "here"), ledger=ledger)
    assert [finding.name for finding in findings] == ["by-hand"]
