"""Other versions of Dagster, in a folder in front of the installed one."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

_BESIDE = ("dagster-aws", "dagster-dg-cli", "dagster-graphql", "dagster-webserver")


def supported_dagster() -> str:
    """Return the package's requirement of Dagster."""
    return next(
        text for text in requires("caf-pipeline") or () if Requirement(text).name == "dagster"
    )


def oldest_dagster() -> str:
    """Return the requirement of the oldest version that the package allows."""
    bounds = Requirement(supported_dagster()).specifier
    (floor,) = [bound.version for bound in bounds if bound.operator == ">="]
    return f"dagster=={floor}"


def find_uv() -> str:
    """Return the path of uv, or skip the test."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed")
    return uv


def install_dagster(requirement: str, folder: Path) -> None:
    """Install a version and its family for `PYTHONPATH`. Skips the test if it is installed anyway.

    Also skips without uv or without a package registry.
    """
    uv = find_uv()
    resolved = subprocess.run(
        [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "-"],
        input="\n".join([requirement, *_BESIDE]),
        capture_output=True,
        text=True,
        check=False,
    )
    if resolved.returncode:
        pytest.skip(f"{requirement} cannot be resolved: {resolved.stderr[-500:]}")
    pins = [line for line in resolved.stdout.splitlines() if line.startswith("dagster")]
    if f"dagster=={version('dagster')}" in pins:
        pytest.skip(f"{requirement} is the installed version")
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
    subprocess.run([*install, "--target", str(folder), *pins], check=True)
