"""The disk of a pod that archives a chunk, as the run tag by which Dagster's launcher for
Kubernetes sizes it.

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
"""The journal of a chunk of a million objects (some 200 MB), what the run prints, and what Python
writes.
"""

BESIDE_SHARE: Final = 20
"""A twentieth of the chunk more, since its manifest is beside it while it is written, and may be
larger than expected.
"""


def pod_tags(instance: DagsterInstance, settings: Settings, chunk_bytes: int) -> Mapping[str, str]:
    """Return the tag for a run that packs a chunk of so many bytes; none where runs are no pods.

    What a pod asks for is reserved at a node, and a pod that takes more is evicted, so that it
    takes nothing from others. There is no tag either where staging is below `home`, which all pods
    share.
    """
    launcher = instance.get_ref().run_launcher_data
    on_kubernetes = launcher is not None and launcher.class_name in ON_KUBERNETES
    if not on_kubernetes or settings.staging_folder.is_relative_to(settings.home):
        return {}
    size = str(chunk_bytes + chunk_bytes // BESIDE_SHARE + BESIDE_BYTES)
    resources = {"requests": {"ephemeral-storage": size}, "limits": {"ephemeral-storage": size}}
    return {POD_TAG: json.dumps({"container_config": {"resources": resources}})}
