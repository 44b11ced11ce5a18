"""Runs the commands of README, tutorial and how-to pages, and checks links and generated pages."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from packaging.version import Version
from typer.main import get_command

from caf_pipeline.cli.app import build
from caf_pipeline.cli.reference import reference
from caf_pipeline_tests.support.free_ports import free_port
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS, wait_for
from caf_pipeline_tests.support.s3_server import client_for
from caf_pipeline_tests.support.sessions import in_session
from caf_pipeline_tests.support.ui_process import wait_for_webserver

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[1]
HOW_TO = ROOT / "docs" / "how-to"
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"


def blocks(language, page=README):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def script_with(text, page=README):
    """Return the only shell block of a page that contains `text`."""
    (script,) = [block for block in blocks("sh", page) if text in block]
    return script


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a copy of the checkout with its environment and a small folder for the demo."""
    if not (ROOT / ".git").exists() or not shutil.which("make"):
        pytest.skip("the README's commands are for a checkout, and need make")
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    for name in listed.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv" / "bin").mkdir(parents=True)
    for program in Path(sys.executable).parent.iterdir():
        (folder / ".venv" / "bin" / program.name).symlink_to(program)
    shutil.copy2(Path(sys.executable).parents[1] / "pyvenv.cfg", folder / ".venv")
    (folder / ".venv" / "lib").symlink_to(Path(sys.executable).parents[1] / "lib")
    (folder / ".venv" / ".ready").touch()  # this test's environment stands for a set-up one
    files = folder / "files" / "python" / "python3.11"
    files.mkdir(parents=True)
    (files / "this.py").write_text("import this\n")
    (files / "empty").touch()
    for number in range(20):
        (files / f"{number}.bin").write_bytes(os.urandom(10_000))
    return folder


@pytest.fixture(scope="module")
def environment(checkout):
    names = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "CAF_", "DAGSTER_", "MAKE"))
    }
    endpoint = f"http://127.0.0.1:{free_port()}"
    lcd = f"http://127.0.0.1:{free_port()}"
    return {name: value for name, value in names.items() if not name.startswith("JACKAL_")} | {
        "PATH": f"{checkout / '.venv' / 'bin'}:{os.environ['PATH']}",
        "FOLDER": str(checkout / "files" / "python"),
        "CAF_SOURCES__DEMO__ENDPOINT_URL": endpoint,
        "CAF_JACKAL__LCD": json.dumps([lcd]),
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def sh(script, checkout, environment, **more):
    done = subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=checkout,
        env=environment | more,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def demonstrated(checkout, environment):
    """Return the output of `make demo`."""
    return sh("make demo", checkout, environment)


def test_make_demo_archives_and_compares(demonstrated):
    assert "22 objects" in demonstrated
    assert "the source is complete" in demonstrated
    assert demonstrated.count("identical: ") >= 5


def test_readme_shows_what_the_demo_prints(demonstrated):
    (shown,) = blocks("console")
    for word in ("the source is complete", "identical: ", " current, ", "Merkle root", "located"):
        assert word in shown
        assert word in demonstrated


@pytest.fixture(scope="module")
def kept_network(demonstrated, checkout, environment):
    """Keep `make network` running; yield its address."""
    process = subprocess.Popen(
        ["make", "network"],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    line = process.stdout.readline()
    assert "Ctrl-C" in line
    yield line.split()[0]
    # SIGINT is ignored if the tests themselves run in the background.
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(PATIENCE_SECONDS)
    process.stdout.close()


def test_object_of_the_demo_is_fetched(kept_network, checkout, environment):
    sh(script_with("caf get demo"), checkout, environment)
    assert (checkout / "this.py").read_text() == "import this\n"


def test_age_opens_a_chunk_of_the_demo(kept_network, checkout, environment, age_tool):
    (checkout / ".venv" / "bin" / "age").symlink_to(age_tool)
    printed = sh(script_with("caf list"), checkout, environment)
    assert ".caf/manifest.parquet" in printed
    assert "jkl1" in printed


def own_folder(page, folder, s3_server):
    """Run the page's `caf init`, with its bucket on `s3_server`.

    Returns the folder and the environment.
    """
    names = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "CAF_", "DAGSTER_", "JACKAL_"))
    }
    programs = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    environment = names | programs | credentials
    init = script_with("caf init", page).strip()
    sh(f"{init} --endpoint-url {s3_server}", folder, environment)
    return folder, environment


@pytest.fixture(scope="module")
def my_bucket(s3_server):
    """The address of an S3 server with the bucket `my-bucket`."""
    client = client_for(s3_server)
    client.create_bucket(Bucket="my-bucket")
    for key, body in (("2024/a.jpg", b"1"), ("2023/other", b"2")):
        client.put_object(Bucket="my-bucket", Key=key, Body=body)
    return s3_server


@pytest.fixture(scope="module")
def stranger(tmp_path_factory, my_bucket):
    return own_folder(TUTORIAL, tmp_path_factory.mktemp("stranger"), my_bucket)


@pytest.fixture(scope="module")
def archived(stranger):
    """The output of the tutorial's commands that archive a bucket."""
    return sh(script_with("caf run", TUTORIAL), *stranger)


def test_tutorial_archives_and_fetches_an_object(archived, stranger):
    for words in (
        "set pool caf_s3",
        "planned   1 object",
        "the source is complete",
        "photos: 1 current, 0 older, 0 gone",
    ):
        assert words in archived
    fetched = sh(script_with("caf restore", TUTORIAL), *stranger)
    assert "1 object of 1 read, 0 wrong" in fetched
    folder, _ = stranger
    assert [(folder / name).read_bytes() for name in ("a.jpg", "out/2024/a.jpg")] == [b"1", b"1"]
    doctor, rebuild = script_with("caf doctor", TUTORIAL).splitlines()
    findings = sh(doctor, *stranger)  # the tutorial makes one key
    assert "1 thing found" in findings
    assert "caf keys new --recovery" in findings
    assert "photos: 1 known" in sh(rebuild, *stranger)


def test_bucket_of_the_readme_is_archived(tmp_path, my_bucket):
    folder, environment = own_folder(README, tmp_path, my_bucket)
    printed = sh(script_with("caf run"), folder, environment)
    assert "planned   2 objects" in printed
    assert "the source is complete" in printed
    assert (folder / "a.jpg").read_bytes() == b"1"


def test_own_bucket_is_archived_on_the_loopback_network(
    kept_network, checkout, environment, tmp_path, my_bucket
):
    page = HOW_TO / "connect-jackal.md"
    folder, own_environment = own_folder(page, tmp_path, my_bucket)
    printed = sh("make network", checkout, environment)
    lines = [line for line in printed.splitlines() if " = " in line]
    (shown,) = [block for block in blocks("toml", page) if "loopback-1" in block]
    assert lines == shown.replace("http://127.0.0.1:5056", kept_network).splitlines()
    settings = folder / "caf.toml"
    text = settings.read_text().replace("[jackal]", "\n".join(["[jackal]", *lines]))
    settings.write_text(text)
    (address,) = re.findall(r"jkl1\w+", sh("caf jackal wallet", folder, own_environment))
    sh(script_with("FUND=", page).replace("jkl1…", address), checkout, environment)
    archive = script_with("100GB", page).replace("--days 30", "--days 30 --yes")
    assert "1 chunk on the chain" in sh(archive, folder, own_environment)


@contextmanager
def dagster_ui(command, folder, environment):
    """Run a command that opens the UI; yield the address of its GraphQL and the command's log."""
    port = free_port()
    log = folder / "ui.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["sh", "-c", f"{command.split('#')[0].strip()} --port {port}"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )

    try:
        wait_for_webserver(process, f"127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}/graphql", log
    finally:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            # As Ctrl-C: the code server then stops its embedded Postgres.
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
        for remaining in in_session(process.pid):
            remaining.kill()
        process.wait(PATIENCE_SECONDS)


SHOWN = """{
  repositoriesOrError { ... on RepositoryConnection { nodes { location { name } assetNodes { assetKey { path } } } } }
  runsOrError { ... on Runs { results { jobName status repositoryOrigin { repositoryLocationName } } } }
}"""  # noqa: E501

TICKS = """{ sensorsOrError(repositorySelector: {repositoryLocationName: "caf-pipeline", repositoryName: "__repository__"}) {
  ... on Sensors { results { name sensorState { status ticks { status } } } } } }"""  # noqa: E501


def query_graphql(url, query):
    answer = httpx.post(
        url, json={"query": query}, trust_env=False, timeout=PATIENCE_SECONDS
    ).json()
    assert "errors" not in answer, answer
    return answer["data"]


def shows(url, source):
    """Assert that the UI has a source's assets, and finished runs of its own code location."""
    shown = query_graphql(url, SHOWN)
    (repository,) = shown["repositoriesOrError"]["nodes"]
    assert [source, "file_locations"] in [
        asset["assetKey"]["path"] for asset in repository["assetNodes"]
    ]
    runs = shown["runsOrError"]["results"]
    assert {(run["jobName"], run["status"]) for run in runs} >= {
        (f"caf_{job}_{source}", "SUCCESS") for job in ("plan", "archive")
    }
    origins = {
        run["repositoryOrigin"]["repositoryLocationName"] for run in runs if run["repositoryOrigin"]
    }
    assert origins <= {repository["location"]["name"]}


def test_ui_of_an_own_folder_shows_its_runs(archived, stranger):
    command = script_with("caf ui", TUTORIAL)
    with dagster_ui(command, *stranger) as (url, _):
        shows(url, "photos")
    assert f"with: {command.split('#')[0].strip()}\n" in archived


def test_dg_dev_shows_runs_and_no_sensor_fails(demonstrated, checkout, environment):
    *_, setup, command = script_with("dg check defs", HOW_TO / "dagster.md").splitlines()
    sh(setup, checkout, environment)
    with dagster_ui(command, checkout, environment) as (url, log):
        shows(url, "demo")

        def states():
            return {
                sensor["name"]: sensor["sensorState"]
                for sensor in query_graphql(url, TICKS)["sensorsOrError"]["results"]
            }

        wait_for(
            lambda: any(
                tick["status"] != "STARTED"
                for state in states().values()
                for tick in state["ticks"]
            )
        )
        assert {name for name, state in states().items() if state["status"] == "RUNNING"} == {
            "caf_watch_sources",
            "caf_end_dead_runs",
        }
        assert not [
            tick
            for state in states().values()
            for tick in state["ticks"]
            if tick["status"] == "FAILURE"
        ]
    assert not re.search("traceback|deprecat", log.read_text(), re.IGNORECASE)


def test_make_ui_ends_all_its_processes_at_sigterm(demonstrated, checkout, environment):
    port = free_port()
    process = subprocess.Popen(
        ["make", "ui"],
        cwd=checkout,
        env=environment | {"PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/server_info", timeout=5
                ) as answer:
                    assert b"dagster_version" in answer.read()
                break
            except OSError:
                time.sleep(0.5)
        shown = client_for(environment["CAF_SOURCES__DEMO__ENDPOINT_URL"]).list_objects_v2(
            Bucket="demo"
        )
        assert shown["KeyCount"] == 22
        assert len(in_session(process.pid)) > 5
        process.terminate()
        process.wait(PATIENCE_SECONDS)
        assert in_session(process.pid) == []
    finally:
        for remaining in in_session(process.pid):
            remaining.kill()
        process.wait(PATIENCE_SECONDS)


def test_dg_loads_the_definitions_without_settings_or_warnings(checkout, tmp_path):
    check, listing, *_ = script_with("dg check defs", HOW_TO / "dagster.md").splitlines()
    bare = {"PATH": os.defpath, "HOME": str(tmp_path)}
    checked, listed = sh(check, checkout, bare), sh(listing, checkout, bare)
    assert "All definitions loaded successfully." in checked
    assert "demo/caf_chunk" in listed
    assert "caf_s3_demo" in listed
    assert not re.search("warning|traceback|deprecat", checked + listed, re.IGNORECASE)


def test_targets_of_the_readme_exist(checkout):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([\w-]+)", "\n".join(blocks("sh")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_command_line_reference_is_current():
    assert (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8") == reference(), (
        "run `make docs`"
    )


def documented_commands():
    """Yield the `caf` commands of README, tutorial and how-to pages, without what they pipe to."""
    for page in [ROOT / "README.md", ROOT / "docs" / "tutorial.md", *HOW_TO.glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        lines = re.findall(r"`(caf [a-z][^`]*)`", text)
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
            lines += [
                re.sub(r"^\s*((docker compose|kubectl) .* (code|--) )?", "", line)
                for line in block.splitlines()
            ]
        for line in lines:
            if line.startswith("caf "):
                words = shlex.split(line, comments=True)
                yield list(itertools.takewhile(lambda word: word not in ("|", "||", ">"), words))


def test_documented_commands_parse():
    commands = list(documented_commands())
    assert len(commands) > 60
    for line in commands:
        command, words = get_command(build()), line[1:]
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        if words and not hasattr(command, "commands"):  # else it names a command or a group
            command.make_context(" ".join(line), words)


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and Python-Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def test_links_between_pages_lead_somewhere():
    outside = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    for page in [*outside, *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)]+?)\)", page.read_text(encoding="utf-8")):
            if link.startswith("http"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
            assert page in outside or target.is_relative_to(ROOT / "docs"), f"{page.name}: {link}"


def test_changelog_begins_with_this_version_or_the_next():
    heading = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert Version(heading.group(1)) >= Version(version("caf-pipeline"))
