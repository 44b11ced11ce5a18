"""A real browser without a screen: Chromium, told what to do through its own ChromeDriver by the
W3C WebDriver protocol.

A handful of requests is all that reading a page takes, so that no client library is needed. What it
is used for is skipped where one of the programs is missing; `.ci/run` installs them. Source:
https://www.w3.org/TR/webdriver2/
"""

import base64
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from caf_pipeline_tests.support.free_ports import free_port
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS

_LOOK_SECONDS = 0.25
_LOOKS_AT_REST = 4

_ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # Chromium's own refuses to run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",  # of a container it has 64 MiB
    "--hide-scrollbars",
)

_TEXT = "return document.body ? document.body.innerText : ''"
_HAS = (
    "return !!document.body && arguments[0].every(text => document.body.innerText.includes(text))"
)
_CLICK = """
const named = e => e.innerText.trim() === arguments[0];
const found = [...document.querySelectorAll("button, a, [role=button], [role=tab]")].filter(named);
if (found.length) found[0].click();
return found.length > 0;"""


needs_browser = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="chromium is not installed (apt-get install chromium chromium-driver)",
)


@dataclass(frozen=True)
class Browser:
    """A window.

    What it shows is waited for, since the UI asks for its parts after the page is there.
    """

    client: httpx.Client

    def open(self, url: str, *texts: str) -> str:
        """Show a page; return its text, as a reader sees it, when all of these are in it."""
        self._post("url", url=url)
        return self.wait_for(*texts)

    def wait_for(self, *texts: str) -> str:
        """Return the page's text when all of these are in it."""
        self.wait_until(_HAS, texts)
        return str(self.run(_TEXT))

    def wait_until(self, script: str, *arguments: Any) -> None:
        """Wait until this function's body is true of the page."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.run(script, *arguments):
            assert time.monotonic() < deadline, (
                f"{script} {arguments} is not so of: {self.run(_TEXT)}"
            )
            time.sleep(_LOOK_SECONDS)

    def click(self, text: str, *texts: str) -> str:
        """Click the first button or link of exactly this text; return the page's text when all of
        the others are in it.
        """
        self.wait_for(text)
        assert self.run(_CLICK, text), f"no button and no link is named {text!r}"
        return self.wait_for(*texts)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function's body of JavaScript in the page; return what it returns."""
        return self._post("execute/sync", script=script, args=arguments)

    def size(self, width: int, height: int) -> None:
        """Let the page be of this size from here on; to do so before it is opened spares it the way
        from one to the other.
        """
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._post("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=metrics)

    def picture(self, path: Path) -> None:
        """Write a PNG file of what the window shows once it has come to rest; a time that it counts
        in seconds never does.
        """
        shown = self._picture()
        for _ in range(_LOOKS_AT_REST):
            time.sleep(4 * _LOOK_SECONDS)
            last, shown = shown, self._picture()
            if shown == last:
                break
        path.write_bytes(shown)

    def _picture(self) -> bytes:
        return base64.b64decode(self._ask("GET", "screenshot"))

    def _post(self, what: str, **body: Any) -> Any:
        return self._ask("POST", what, body)

    def _ask(self, method: str, what: str, body: Any = None) -> Any:
        answer = self.client.request(method, what, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A window of a new profile in this folder; it and its processes are ended."""
    port = free_port()
    with (folder / "browser.log").open("ab") as log:
        process = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=log, stderr=log, start_new_session=True
        )
    options = {
        "binary": shutil.which("chromium"),
        "args": [*_ARGUMENTS, f"--user-data-dir={folder / 'profile'}"],
    }
    wanted = {"alwaysMatch": {"goog:chromeOptions": options, "pageLoadStrategy": "eager"}}
    try:
        # Not by a proxy of the environment.
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS, trust_env=False
        ) as client:
            while True:
                with suppress(httpx.TransportError):
                    client.get("/status")
                    break
                assert process.poll() is None, (folder / "browser.log").read_text()
                time.sleep(_LOOK_SECONDS)
            session = client.post("/session", json={"capabilities": wanted}).json()["value"]
            assert "sessionId" in session, session
            client.base_url = f"http://127.0.0.1:{port}/session/{session['sessionId']}/"
            yield Browser(client)
            client.delete("")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
