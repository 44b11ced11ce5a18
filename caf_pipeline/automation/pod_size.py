"""The run tag that sets the disk size of a Kubernetes pod for a chunk.

Source: dagster-k8s 0.29.27, `K8sContainerContext.create_for_run`.
"""

import json
from collections.abc import Mapping
from typing import Final

from dagster import DagsterInstance

from caf_pipeline.settings import Settings

POD_TAG: Final = "dagster-k8s/config"

ON_KUBERNETES: Final = ("K8sRunLauncher", "CheckedK8sRunLauncher")

BESIDE_BYTES: Final = 1 << 30
"""For the journal of a million objects (some 200 MB), the run's output and Python's files."""

BESIDE_SHARE: Final = 20
"""One twentieth, for a manifest that exceeds its estimate."""


def pod_tags(instance: DagsterInstance, settings: Settings, chunk_bytes: int) -> Mapping[str, str]:
    """Return the tag for a run that packs a chunk of this size.

    Kubernetes evicts a pod that uses more disk. There is none if runs are not pods, or if staging
    is below `home`, which all pods share.
    """
    launcher = instance.get_ref().run_launcher_data
    on_kubernetes = launcher is not None and launcher.class_name in ON_KUBERNETES
    if not on_kubernetes or settings.staging_folder.is_relative_to(settings.home):
        return {}
    size = str(chunk_bytes + chunk_bytes // BESIDE_SHARE + BESIDE_BYTES)
    resources = {"requests": {"ephemeral-storage": size}, "limits": {"ephemeral-storage": size}}
    return {POD_TAG: json.dumps({"container_config": {"resources": resources}})}
