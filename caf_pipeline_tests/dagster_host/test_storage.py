"""Dagster's own storage: SQLite, Postgres, and DAGSTER_HOME."""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dagster import DagsterInstance, job, op
from dagster_postgres.storage import DagsterPostgresStorage

from caf_pipeline.dagster_host.home import prepare_dagster_home
from caf_pipeline.dagster_host.run_source import open_instance
from caf_pipeline.dagster_host.storage import (
    URL_VARIABLE,
    ChosenStorage,
    require_database,
    with_driver,
)
from caf_pipeline.dagster_host.team_project import HOME_VARIABLE
from caf_pipeline.dagster_private import DagsterSqliteStorage
from caf_pipeline.errors import SettingsError
from caf_pipeline.settings import Settings

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]


@op
def nothing() -> None: ...


@job
def a_job() -> None:
    nothing()


def chosen():
    return ChosenStorage.from_config_value(None, {})


def test_without_a_url_it_is_sqlite_in_dagster_home(home_settings, instance):
    assert isinstance(chosen(), DagsterSqliteStorage)
    a_job.execute_in_process(instance=instance)
    assert (home_settings.home / "dagster" / "history").is_dir()


@pytest.mark.parametrize(
    ("module", "use"),
    [("psycopg2", require_database), ("dagster_postgres.storage", chosen)],
    ids=["psycopg2", "dagster_postgres"],
)
def test_postgres_without_the_extra_host_names_it(monkeypatch, module, use):
    monkeypatch.setenv(URL_VARIABLE, "postgresql://u@127.0.0.1:1/d")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError, match="not installed") as refused:
        use()
    assert "caf-pipeline[host]" in refused.value.hint


OPENING = """
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.settings import Settings
print(flush=True)
sys.stdin.readline()
with open_instance(Settings(home=Path(sys.argv[1]))):
    pass
"""


@pytest.mark.thorough
def test_processes_that_open_a_new_storage_together_all_can(home_settings):
    command = [sys.executable, "-c", OPENING, str(home_settings.home)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)
    ]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0] * 4


@pytest.mark.thorough
def test_with_a_url_it_is_postgres(empty_database_url, home_settings, monkeypatch):
    monkeypatch.setenv(URL_VARIABLE, empty_database_url)
    with open_instance(home_settings) as instance:
        assert isinstance(chosen(), DagsterPostgresStorage)
        result = a_job.execute_in_process(instance=instance)
        instance.add_dynamic_partitions("many", [f"chunk-{number}" for number in range(70_000)])
        assert instance.get_run_by_id(result.run_id).is_success
        assert len(instance.get_dynamic_partitions("many")) == 70_000
    assert not (home_settings.home / "dagster" / "history").exists()


def test_concurrent_runs_on_postgres_share_a_pool_limit(
    empty_database_url, home_settings, monkeypatch
):
    monkeypatch.setenv(URL_VARIABLE, empty_database_url)

    def taken(*pools):
        with open_instance(home_settings) as instance:
            log = instance.event_log_storage
            for pool in pools:
                assert log.initialize_concurrency_limit_to_default(pool)
            infos = [log.get_concurrency_info(pool) for pool in ("s3", "own")]
            return [(info.slot_count, info.using_default_limit) for info in infos]

    with open_instance(home_settings) as instance:
        instance.event_log_storage.set_concurrency_slots("own", 2)
    assert taken("s3", "s3", "own") == [(4, True), (2, False)]
    file = prepare_dagster_home(home_settings) / "dagster.yaml"
    text = file.read_text()
    file.unlink()
    file.write_text(text.replace("default_limit: 4", "default_limit: 3"))
    assert taken("s3", "own") == [(3, True), (2, False)]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (
            "postgresql://u:p@h:1/d?sslmode=require",
            "postgresql+psycopg2://u:p@h:1/d?sslmode=require",
        ),
        ("postgres://h/d", "postgresql+psycopg2://h/d"),
        ("postgresql+psycopg://h/d", "postgresql+psycopg2://h/d"),
        ("postgresql+psycopg2:///d?host=/run", "postgresql+psycopg2:///d?host=/run"),
    ],
)
def test_the_driver_is_the_one_that_dagster_can_use(given, used):
    assert with_driver(given) == used


@pytest.mark.parametrize("url", ["mysql://u:secret@h/d", "secret", ""])
def test_a_url_of_something_else_is_refused_without_repeating_it(url):
    with pytest.raises(SettingsError, match=URL_VARIABLE) as refused:
        with_driver(url)
    assert "secret" not in str(refused.value)


def test_an_unreachable_database_is_a_settings_error(home_settings, monkeypatch):
    monkeypatch.setenv(URL_VARIABLE, "postgresql://u:secret@127.0.0.1:1/d")
    with (
        pytest.raises(SettingsError, match="database cannot") as refused,
        open_instance(home_settings),
    ):
        pass
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_home_has_our_files_and_is_told_to_children(home_settings):
    folder = prepare_dagster_home(home_settings)
    assert os.environ[HOME_VARIABLE] == str(folder) == str(home_settings.home / "dagster")
    for name in ("dagster.yaml", "workspace.yaml"):
        assert (folder / name).resolve() == Path(__file__).parents[2] / name
    assert prepare_dagster_home(home_settings) == folder


def test_a_wrong_link_is_replaced_and_an_own_file_stays(home_settings):
    link = prepare_dagster_home(home_settings) / "dagster.yaml"
    link.unlink()
    link.symlink_to("/nowhere")
    prepare_dagster_home(home_settings)
    assert link.exists()

    link.unlink()
    link.write_text("telemetry:\n  enabled: false\n")
    prepare_dagster_home(home_settings)
    assert not link.is_symlink()


def test_a_link_to_another_copy_is_replaced(home_settings, tmp_path):
    link = prepare_dagster_home(home_settings) / "dagster.yaml"
    mine = link.readlink()
    for folder, stays in (
        (tmp_path / "etc", True),
        (tmp_path / "old", False),
        (tmp_path / "wheel" / "caf_pipeline", False),
    ):
        folder.mkdir(parents=True)
        (folder / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        if folder.name == "old":
            (folder / "caf_pipeline").mkdir()
        link.unlink()
        link.symlink_to(folder / "dagster.yaml")
        prepare_dagster_home(home_settings)
        assert link.readlink() == (folder / "dagster.yaml" if stays else mine)


def test_a_replaced_link_is_never_missing(home_settings, tmp_path):
    link = prepare_dagster_home(home_settings) / "dagster.yaml"
    for folder in ("older", "newer"):
        (tmp_path / folder / "caf_pipeline").mkdir(parents=True)
        (tmp_path / folder / "dagster.yaml").write_text("")

    def upgrade():
        for number in range(500):
            other_copy = tmp_path / ("older", "newer")[number % 2]
            link.with_name("other").symlink_to(other_copy / link.name)
            link.with_name("other").replace(link)
            prepare_dagster_home(home_settings)

    with ThreadPoolExecutor(1) as pool:
        upgrades = pool.submit(upgrade)
        while not upgrades.done():
            assert link.exists()
    upgrades.result()
    assert sorted(os.listdir(link.parent)) == ["dagster.yaml", "workspace.yaml"]


def test_a_home_that_cannot_be_created_is_a_settings_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be written"):
        prepare_dagster_home(Settings(home=tmp_path / "file"))


@pytest.mark.skipif(os.geteuid() != 0, reason="it needs two users")
@pytest.mark.parametrize(
    ("path", "module", "call"),
    [
        (".", "home", "prepare_dagster_home(settings)"),
        ("history/runs.db", "home", "prepare_dagster_home(settings)"),
        (".", "setup", "setup_command(settings=settings)"),
    ],
)
def test_a_home_of_another_user_is_refused_with_the_owner(path, module, call):
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        folder = Path(name) / "home" / "dagster"
        (folder / "history").mkdir(parents=True)
        (folder / "history" / "runs.db").write_text("")
        for made in (folder.parent, folder, folder / "history"):
            shutil.chown(made, "nobody")
        os.chown(folder / path, 0, 0)
        folder.chmod(0o700 if path == "." else 0o755)
        script = f"""
import os
import shutil
from pathlib import Path
from caf_pipeline.dagster_host.{module} import {call.partition("(")[0]}
from caf_pipeline.settings import Settings
settings = Settings(home=Path({name!r}) / "home")
os.setuid(65534)
{call}
"""
        refused = subprocess.run(
            [sys.executable, "-c", script], cwd=name, capture_output=True, text=True, check=False
        )
    assert "SettingsError: " in refused.stderr
    assert "belongs to the user root" in refused.stderr


def test_make_can_ask_for_the_home_without_loading_dagster(tmp_path):
    (tmp_path / "caf.toml").write_text('home = "kept"\n')
    script = (
        "import runpy, sys; sys.argv = ['home']\ntry:\n "
        "runpy.run_module('caf_pipeline.dagster_host.home', run_name='__main__')\n"
    )
    script += "except SystemExit as end:\n assert not end.code\nassert 'dagster' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{tmp_path}/kept/dagster\n"


def test_the_instance_does_what_our_file_says(home_settings, monkeypatch):
    prepare_dagster_home(home_settings)
    with DagsterInstance.get() as instance:
        assert instance.run_launcher.supports_check_run_worker_health
        assert instance.run_monitoring_enabled
        assert instance.run_retries_enabled
        assert not instance.run_retries_retry_on_asset_or_op_failure
        assert not instance.telemetry_enabled
        assert (
            instance.run_coordinator.dequeue_use_threads
        )  # else no run begins while another's process loads
