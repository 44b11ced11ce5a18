"""Waits for a Dagster webserver that a test started."""

import subprocess
from pathlib import Path

import httpx

from caf_pipeline_tests.support.patience import wait_for


def wait_for_webserver(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    """Return when the server at `address` answers. If its process ends, fail with its log."""

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"http://{address}/server_info", trust_env=False).is_success
        except httpx.TransportError:
            return False

    wait_for(answers)
