"""Writes an S3 Inventory report of the demo's bucket.

The demo's S3 server, moto, writes none.
"""

import os

import server
from rich.console import Console

from caf_pipeline_tests.support.inventory_reports import FORMATS, ReportWriter

__all__ = ["FORMATS", "write"]

BUCKET = f"{server.BUCKET}-reports"


def write(file_format: str, console: Console) -> None:
    """Write a report of the bucket, and make it the inventory of the demo's source."""
    client = server.client()
    client.create_bucket(Bucket=BUCKET)
    reports = ReportWriter(client, server.BUCKET, BUCKET, file_format, folder_prefix="s3")
    name = reports.write()
    os.environ["CAF_SOURCES__DEMO__INVENTORY"] = reports.folder
    console.print(f"wrote the inventory report {reports.folder}{name}/ ({file_format})")
