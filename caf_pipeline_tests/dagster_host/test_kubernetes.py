"""Runs as pods: the Jobs that the real launcher requests from a fake Kubernetes API."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from dagster import DagsterInstance
from dagster_k8s.client import DagsterK8sUnrecoverableAPIError

from caf_pipeline.automation.pod_size import pod_tags
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host.home import dagster_home
from caf_pipeline.dagster_host.team_project import HOME_VARIABLE
from caf_pipeline.dagster_private import JobPythonOrigin, LaunchRunContext, WorkerStatus
from caf_pipeline.naming import MAX_RETRIES_TAG
from caf_pipeline.settings import load_settings
from caf_pipeline_tests.support.dagster_daemon import ROOT, settings_of
from caf_pipeline_tests.support.dagster_private import (
    CodePointer,
    RepositoryPythonOrigin,
)
from caf_pipeline_tests.support.ticks import evaluate_tick

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

KUBERNETES = ROOT / "deploy" / "kubernetes"
IMAGE = "registry.example/caf-pipeline:0.5.0.dev0"
ARCHIVE = "caf_archive_my_source"
VERSIONS = ("1.27", "1.37")


def validate(described):
    """Validate an object by Kubernetes' own schemas; an unknown field is an error."""
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed (.ci/run installs it)"
    )
    for version in VERSIONS:
        schemas.validate(described, version, strict=True)


def manifests():
    return list(yaml.safe_load_all((KUBERNETES / "caf-pipeline.yaml").read_text()))


@dataclass
class Cluster:
    """A fake Kubernetes API that accepts Jobs, or refuses them, and has some `objects`.

    Attributes:
        objects: by the end of their path, lists of objects by their kind.
    """

    jobs: list[dict] = field(default_factory=list)
    objects: dict[str, dict] = field(default_factory=dict)
    status: int = 201


@contextmanager
def serving(cluster: Cluster) -> Iterator[str]:
    """Serve the API, and return its address."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, status, body):
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self):
            job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if cluster.status == 201:
                cluster.jobs.append(job | {"asked": self.path})
            self._answer(cluster.status, {})

        def do_GET(self):
            path = urlsplit(self.path).path
            for end, described in cluster.objects.items():
                if path.endswith(end):
                    return self._answer(200, described)
            return self._answer(404, {"kind": "Status", "code": 404, "reason": "NotFound"})

        def log_message(self, *_):
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def on_kubernetes(pipeline, tmp_path, monkeypatch):
    """The pipeline with the example's dagster.yaml, and its cluster."""
    monkeypatch.setenv("POD_NAMESPACE", "archive")
    described = yaml.safe_load((KUBERNETES / "dagster.yaml").read_text())
    cluster = Cluster()
    with serving(cluster) as address:
        cluster_of_it = {"clusters": [{"name": "c", "cluster": {"server": address}}]}
        context = {
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}],
            "current-context": "c",
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(cluster_of_it | context))
        outside = {"load_incluster_config": False, "kubeconfig_file": str(tmp_path / "kubeconfig")}
        described["run_launcher"]["config"] |= outside
        home = dagster_home(pipeline.settings)
        (home / "dagster.yaml").unlink()
        (home / "dagster.yaml").write_text(yaml.safe_dump(described))
        with DagsterInstance.from_config(str(home)) as instance:
            settings = pipeline.settings.model_copy(
                update={"staging": tmp_path / "staging"}
            )  # of each pod alone
            yield replace(pipeline, instance=instance, settings=settings), cluster


def run_of(pipeline, **tags):
    """Create a run with the origin that a code server adds."""
    code = CodePointer.from_module("caf_pipeline.definitions", "defs", None)
    origin = JobPythonOrigin(
        ARCHIVE,
        RepositoryPythonOrigin("python", code, container_image=IMAGE, entry_point=["dagster"]),
    )
    return pipeline.instance.create_run_for_job(
        pipeline.defs.resolve_job_def(ARCHIVE), tags=tags, job_code_origin=origin
    )


def test_manifests_are_what_kubernetes_takes():
    for item in manifests():
        validate(item)


def test_the_schemas_would_find_a_slip():
    (claim,) = [item for item in manifests() if item["kind"] == "PersistentVolumeClaim"]
    claim["spec"]["accessMode"] = claim["spec"].pop("accessModes")
    with pytest.raises(Exception, match="accessMode"):
        validate(claim)


def test_a_chunks_pod_has_a_disk_of_its_size(on_kubernetes):
    pipeline, cluster = on_kubernetes
    pipeline.put(6)
    (name,) = pipeline.plan()
    (request,) = evaluate_tick(pipeline, "caf_launch_chunks").run_requests
    pipeline.instance.run_launcher.launch_run(
        LaunchRunContext(run_of(pipeline, **request.tags), None)
    )
    (job,) = cluster.jobs
    assert job.pop("asked").startswith("/apis/batch/v1/namespaces/archive/jobs")
    validate(job)

    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    expected = pipeline.ledger.chunks.get(name).expected_size_bytes
    size = str(expected + expected // 20 + (1 << 30))
    assert container["resources"]["requests"] == {
        "cpu": "1",
        "memory": "1Gi",
        "ephemeral-storage": size,
    }
    assert container["resources"]["limits"] == {"memory": "2Gi", "ephemeral-storage": size}
    assert container["image"] == IMAGE
    assert pod["restartPolicy"] == "Never"
    assert pod["automountServiceAccountToken"] is False
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounted["/staging"]]["emptyDir"] == {}
    named = {(item["kind"], item["metadata"]["name"]) for item in manifests()}
    assert (
        "PersistentVolumeClaim",
        volumes[mounted["/data"]]["persistentVolumeClaim"]["claimName"],
    ) in named
    assert ("ServiceAccount", pod["serviceAccountName"]) in named
    assert ("ConfigMap", "caf-pipeline-environment") in named
    env_from = [next(iter(item.values()))["name"] for item in container["envFrom"]]
    assert env_from == ["caf-pipeline-environment", "caf-pipeline-dagster", "caf-pipeline-keys"]


def test_a_run_that_cannot_be_launched_is_not_retried(on_kubernetes):
    pipeline, cluster = on_kubernetes
    cluster.status = 403
    run = run_of(pipeline)
    with pytest.raises(DagsterK8sUnrecoverableAPIError):
        pipeline.instance.run_launcher.launch_run(LaunchRunContext(run, None))
    assert pipeline.instance.get_run_by_id(run.run_id).tags[MAX_RETRIES_TAG] == "0"


@pytest.mark.parametrize(("reason", "is_named"), [("OOMKilled", True), ("Error", False)])
def test_a_pod_without_memory_is_told_from_another_failure(on_kubernetes, reason, is_named):
    pipeline, cluster = on_kubernetes
    run = run_of(pipeline)
    state = {"terminated": {"exitCode": 137, "reason": reason}}
    status = {"name": "dagster", "state": state, "image": IMAGE, "imageID": "", "ready": False}
    pod = {
        "metadata": {"name": "pod"},
        "status": {"phase": "Failed", "containerStatuses": [status | {"restartCount": 0}]},
    }
    cluster.objects = {"/pods": {"items": [pod]}, "/events": {"items": []}}
    answer = pipeline.instance.run_launcher.get_run_worker_debug_info(run)
    assert ("resources.limits.memory" in answer) is is_named


@pytest.mark.thorough
def test_the_command_of_a_pod_archives_the_chunk(on_kubernetes, tmp_path, monkeypatch):
    pipeline, cluster = on_kubernetes
    pipeline.put(6)
    (name,) = pipeline.plan()
    (request,) = evaluate_tick(pipeline, "caf_launch_chunks").run_requests
    run = run_of(pipeline, **request.tags)
    pipeline.instance.run_launcher.launch_run(LaunchRunContext(run, None))
    (container,) = cluster.jobs[0]["spec"]["template"]["spec"]["containers"]
    monkeypatch.delenv("POD_NAMESPACE")  # which a run does not get
    program, *arguments = container["args"]
    environment = settings_of(pipeline, tmp_path) | {
        HOME_VARIABLE: str(dagster_home(pipeline.settings))
    }
    command = [Path(sys.executable).with_name(program), *arguments]
    done = subprocess.run(
        command,
        env=os.environ | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert pipeline.instance.get_run_by_id(run.run_id).is_success, done.stderr
    assert pipeline.ledger.chunks.get(name).state is ChunkState.LOCATED


def test_no_disk_is_requested_for_shared_staging(on_kubernetes, pipeline):
    on_kubernetes, _ = on_kubernetes
    assert pod_tags(on_kubernetes.instance, on_kubernetes.settings, 7)
    assert not pod_tags(on_kubernetes.instance, pipeline.settings, 7)
    assert not pod_tags(pipeline.instance, on_kubernetes.settings, 7)


def test_a_run_of_caf_run_needs_no_pod(on_kubernetes):
    pipeline, _ = on_kubernetes
    health = pipeline.instance.run_launcher.check_run_worker_health
    assert health(run_of(pipeline, **{"caf/command": "caf run"})).status is WorkerStatus.RUNNING
    assert (
        health(run_of(pipeline)).status is WorkerStatus.UNKNOWN
    )  # its Job is gone: monitoring ends it


def test_only_the_code_server_gets_keys(tmp_path, monkeypatch):
    deployments = {
        item["metadata"]["name"]: item["spec"]["template"]["spec"]
        for item in manifests()
        if item["kind"] == "Deployment"
    }
    secrets = {
        name: [
            source["secretRef"]["name"]
            for source in pod["containers"][0]["envFrom"]
            if "secretRef" in source
        ]
        for name, pod in deployments.items()
    }
    assert secrets == {
        "caf-pipeline-code": ["caf-pipeline-dagster", "caf-pipeline-keys"],
        "caf-pipeline-daemon": ["caf-pipeline-dagster"],
        "caf-pipeline-webserver": ["caf-pipeline-dagster"],
    }
    (environment,) = [
        item["data"]
        for item in manifests()
        if item["metadata"]["name"] == "caf-pipeline-environment"
    ]
    (tmp_path / "caf.toml").write_text(
        '[sources.photos]\nbucket = "photos"\n[store]\nkind = "directory"\n'
    )
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CAF_CONFIG", "caf.toml")
    settings = load_settings()
    assert str(settings.staging_folder) == "/staging"
    assert str(dagster_home(settings)) == environment["DAGSTER_HOME"]


def test_its_dagster_yaml_is_ours_but_for_what_kubernetes_needs():
    mine, source = (
        yaml.safe_load(path.read_text())
        for path in (ROOT / "dagster.yaml", KUBERNETES / "dagster.yaml")
    )
    assert list(mine) == list(source)
    assert {name for name in mine if mine[name] != source[name]} == {
        "run_launcher",
        "run_monitoring",
        "concurrency",
    }


def test_pods_of_the_helm_chart_are_those_of_our_manifests():
    values = yaml.safe_load((KUBERNETES / "values.yaml").read_text())
    instance = yaml.safe_load((KUBERNETES / "dagster.yaml").read_text())
    own_launcher = instance["run_launcher"]["config"]
    launcher = values["runLauncher"]["config"]["k8sRunLauncher"]
    assert launcher["resources"] == own_launcher["resources"]
    of_runs = own_launcher["run_k8s_config"]
    of_chart = launcher["runK8sConfig"]
    assert of_chart["jobSpecConfig"] == of_runs["job_spec_config"]
    assert of_chart["podSpecConfig"].items() <= of_runs["pod_spec_config"].items()
    (deployment,) = values["dagster-user-deployments"]["deployments"]
    code = container_of("caf-pipeline-code")
    assert set(deployment["dagsterApiGrpcArgs"]) < set(code["command"])
    mounts = [mount for mount in code["volumeMounts"] if mount in deployment["volumeMounts"]]
    assert len(mounts) == len(deployment["volumeMounts"])
    (waits,) = [item for item in container_of("caf-pipeline-daemon")["env"] if "value" in item]
    assert values["dagsterDaemon"]["env"] == {waits["name"]: waits["value"]}


def container_of(deployment):
    (item,) = [
        item
        for item in manifests()
        if (item["kind"], item["metadata"]["name"]) == ("Deployment", deployment)
    ]
    (container,) = item["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.thorough
def test_a_code_server_that_cannot_load_our_code_ends(tmp_path):
    (tmp_path / "caf.toml").write_text("[sources.photos")
    program, *arguments = container_of("caf-pipeline-code")["command"]
    port = arguments.index("--port")
    arguments[port : port + 2] = ["--socket", "socket"]
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments],
        env=os.environ | {"CAF_CONFIG": str(tmp_path / "caf.toml"), "DAGSTER_HOME": str(tmp_path)},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
