"""The run launcher for Kubernetes: a run is a Job of one pod; see `automation.pod_size`."""

from dagster import DagsterRun
from dagster_k8s.launcher import K8sRunLauncher

from caf_pipeline.dagster_host.dagster_private import CheckRunHealthResult
from caf_pipeline.dagster_host.run_launcher import CheckedRuns


class CheckedK8sRunLauncher(CheckedRuns, K8sRunLauncher):
    """Launches runs as pods, and leaves runs of `caf run` alone.

    Dagster's own launcher would find no pod for a run of `caf run`, and end it.
    """

    def ask_worker(self, run: DagsterRun) -> CheckRunHealthResult:
        """Return the health of the run's Job."""
        answer: CheckRunHealthResult = K8sRunLauncher.check_run_worker_health(self, run)
        return answer
