"""`caf policy`: the least IAM policy of a source.

Source: "Actions, resources, and condition keys" of Amazon S3 and SQS in AWS's service authorization
reference.
"""

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import typer

from caf_pipeline.cli.terminal import SourceArgument
from caf_pipeline.setting_values import names_access_point
from caf_pipeline.settings import SourceSettings, load_settings


def policy(source: SourceArgument) -> None:
    r"""Print the least IAM policy for a source, as JSON.

    It allows reads of the source's prefix, inventory reports and queue, and nothing else. Objects
    that are encrypted with a key of KMS need kms:Decrypt of that key, too. If the source has a
    prefix, S3 may answer 403 instead of 404 for an object that is gone. It is then skipped as
    access denied.

    \b
    Example:
      caf policy photos > policy.json

    \b
    Exit status: 0, 3
    """
    document = least_policy(load_settings().source(source))
    typer.echo(json.dumps(document, indent=2))


def least_policy(source: SourceSettings) -> dict[str, Any]:
    """Return the policy document: reads only, of this source's bucket, reports and queue."""
    partition = _partition(source.region)
    bucket = _bucket_arn(source.bucket, partition)
    objects = f"{bucket}/object" if names_access_point(source.bucket) else bucket
    settings = ["s3:GetBucketVersioning"]
    statements = [
        _listing(bucket, source.prefix, ["s3:ListBucket", "s3:ListBucketVersions"]),
        _allow(["s3:GetObject", "s3:GetObjectVersion"], f"{objects}/{_literal(source.prefix)}*"),
    ]
    if source.inventory:
        folder = urlsplit(source.inventory)
        reports, prefix = _bucket_arn(folder.netloc, partition), folder.path.lstrip("/")
        settings.append("s3:GetInventoryConfiguration")
        statements += [
            _listing(reports, prefix, ["s3:ListBucket"]),
            _allow(["s3:GetObject"], f"{reports}/{_literal(prefix)}*"),
        ]
    if source.queue:
        queue = _queue_arn(source, partition)
        statements.append(_allow(["sqs:ReceiveMessage", "sqs:DeleteMessage"], queue))
    return {"Version": "2012-10-17", "Statement": [_allow(settings, bucket), *statements]}


def _allow(actions: Sequence[str], resource: str) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": list(actions), "Resource": resource}


def _listing(bucket: str, prefix: str, actions: Sequence[str]) -> dict[str, Any]:
    statement = _allow(actions, bucket)
    if prefix:
        statement["Condition"] = {"StringLike": {"s3:prefix": f"{_literal(prefix)}*"}}
    return statement


def _literal(prefix: str) -> str:
    """Escape wildcards and variables, as in "Specifying special characters" of IAM's user guide."""
    return re.sub(r"[*?$]", r"${\g<0>}", prefix)


def _partition(region: str) -> str:
    for beginning in ("cn", "us-gov"):
        if region.startswith(f"{beginning}-"):
            return f"aws-{beginning}"
    return "aws"


def _bucket_arn(bucket: str, partition: str) -> str:
    return bucket if bucket.startswith("arn:") else f"arn:{partition}:s3:::{bucket}"


def _queue_arn(source: SourceSettings, partition: str) -> str:
    url = urlsplit(source.queue)
    *_, account, name = url.path.strip("/").split("/")
    labels = (url.hostname or "").split(".")
    region = labels[1] if labels[0] == "sqs" and len(labels) > 2 else source.region or "*"
    return f"arn:{partition}:sqs:{region}:{account}:{name}"
