"""Makes an existing bucket a source of the demo, through environment variables."""

import os
import re
import sys

from caf_pipeline.errors import CafError
from caf_pipeline.settings import load_settings


def use(name: str, inventory: str = "") -> str:
    """Set the variables of the source, and return its name. `inventory` is the reports' folder."""
    source = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:30].strip("-")
    if not source or source == "demo":
        sys.exit(
            f"bucket '{name}' needs its own source in caf.toml; see docs/reference/settings.md"
        )
    prefix = f"CAF_SOURCES__{source.upper()}__"
    os.environ[f"{prefix}BUCKET"] = name
    os.environ[f"{prefix}ENDPOINT_URL"] = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get(
        "AWS_ENDPOINT_URL", ""
    )
    os.environ[f"{prefix}INVENTORY"] = inventory
    try:
        load_settings()
    except CafError as error:
        sys.exit(f"{error}\n{error.hint}".strip())
    return source
