"""What deploy/ names is what there is: settings, programs, modules, locked versions."""

import re
import shutil
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml

from caf_pipeline.dagster_host.celery_launcher import CheckedCeleryRunLauncher
from caf_pipeline.dagster_host.storage import URL_VARIABLE
from caf_pipeline.dagster_private import InstanceRef
from caf_pipeline.settings import load_settings

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "deploy" / "compose"


def works(program):
    return (
        bool(shutil.which(program))
        and not subprocess.run([program, "info"], capture_output=True, check=False).returncode
    )


@pytest.fixture
def services(tmp_path):
    text = (COMPOSE / "compose.yaml").read_text()
    return yaml.safe_load(re.sub(r"\$\{\w+:\?[^}]*}", "word", text).replace("$$", "$"))["services"]


def test_all_that_containers_get_by_their_environment_is_a_setting(services, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "caf.toml"
    config.write_text('[sources.photos]\nbucket = "photos"\n[store]\nkind = "directory"\n')
    given = {
        name: value
        for one in services.values()
        for name, value in one["environment"].items()
        if name.startswith("CAF_")
    }
    assert set(given) == {"CAF_CONFIG", "CAF_HOME", "CAF_DATABASE_URL", URL_VARIABLE}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CAF_CONFIG", str(config))
    settings = load_settings()
    assert str(settings.home) == given["CAF_HOME"]
    assert settings.database_url
    assert settings.database_url.get_secret_value() == given["CAF_DATABASE_URL"]


def test_only_the_code_server_has_keys_and_the_ledger(services):
    assert [
        name
        for name, one in services.items()
        if "env_file" in one or "CAF_DATABASE_URL" in one["environment"]
    ] == ["code"]


def test_image_has_the_locked_versions_of_all_requirements():
    docker = (COMPOSE / "Dockerfile").read_text()
    assert "--constraint requirements.lock" in docker
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    wanted = [
        one
        for one in requires("caf-pipeline") or ()
        if "extra ==" not in one or re.search("extra == '(host|celery|k8s)'", one)
    ]
    needed = {re.split(r"[^\w.-]", one)[0].lower() for one in wanted}
    assert needed > {"dagster", "dagster-webserver", "dagster-celery", "dagster-k8s"}
    assert needed <= {name.lower() for name in pinned}
    for copied in re.findall(r"^COPY ([^-].*) \S+$", docker, re.MULTILINE):
        assert all((ROOT / name).exists() for name in copied.split())


@pytest.mark.thorough
def test_image_runs_caf_as_an_ordinary_user():
    program = next(filter(works, ("docker", "podman")), None)
    if not program:
        pytest.skip("neither docker nor podman works here")
    subprocess.run(["make", "image"], cwd=ROOT, check=True)
    run = [program, "run", "--rm", "caf-pipeline", "sh", "-c", "id -u; caf version"]
    user, version = subprocess.run(
        run, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert user == "1000"
    assert version.startswith("caf ")


def test_celery_example_differs_from_dagster_yaml_only_for_celery(tmp_path, monkeypatch):
    example = ROOT / "deploy" / "celery" / "dagster.yaml"
    ours, its = (yaml.safe_load(path.read_text()) for path in (ROOT / "dagster.yaml", example))
    assert list(ours) == list(its)
    assert {name for name in ours if ours[name] != its[name]} == {
        "run_launcher",
        "run_monitoring",
        "concurrency",
    }
    shutil.copy(example, tmp_path)
    monkeypatch.setenv("CAF_CELERY_BROKER", "redis://:word@broker:6379/0")
    launcher = InstanceRef.from_dir(str(tmp_path)).run_launcher
    assert isinstance(launcher, CheckedCeleryRunLauncher)
    assert launcher.celery.conf.broker_url == "redis://:word@broker:6379/0"
