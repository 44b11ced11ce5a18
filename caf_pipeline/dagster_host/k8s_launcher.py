"""The run launcher for Kubernetes: a run is a Job of one pod; see `automation.pod_size`."""

from dagster import DagsterRun
from dagster_k8s.launcher import K8sRunLauncher

from caf_pipeline.dagster_host.run_launcher import CheckedRuns
from caf_pipeline.dagster_private import CheckRunHealthResult


class CheckedK8sRunLauncher(CheckedRuns, K8sRunLauncher):
    """Launches runs as pods.

    Dagster's own launcher would end a run of `caf run`, which has no pod.
    """

    def ask_worker(self, run: DagsterRun) -> CheckRunHealthResult:
        answer: CheckRunHealthResult = K8sRunLauncher.check_run_worker_health(self, run)
        return answer

    def get_run_worker_debug_info(
        self, run: DagsterRun, include_container_logs: bool | None = True
    ) -> str | None:
        """Return what the run's log says about a pod that failed."""
        text: str | None = super().get_run_worker_debug_info(run, include_container_logs)
        if text and "OOMKilled" in text:
            text = f"Memory ran out: raise `resources.limits.memory` in dagster.yaml.\n{text}"
        return text
