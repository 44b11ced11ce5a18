"""The run launcher for Kubernetes: a run is a Job of one pod, whose disk is sized by the tag that
`defs.pod_size` makes.
"""

from dagster import DagsterRun
from dagster_k8s.launcher import K8sRunLauncher

from caf_pipeline.dagster_host.dagster_private import CheckRunHealthResult
from caf_pipeline.dagster_host.run_launcher import CheckedRuns


class CheckedK8sRunLauncher(CheckedRuns, K8sRunLauncher):
    """Launches runs as pods and checks on them.

    Dagster's own looks for the pod of a run that `caf run` executes itself, finds none, and ends
    the run.
    """

    def ask_worker(self, run: DagsterRun) -> CheckRunHealthResult:
        """Ask Kubernetes for the run's Job."""
        answer: CheckRunHealthResult = K8sRunLauncher.check_run_worker_health(self, run)
        return answer
