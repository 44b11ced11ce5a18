"""Dagster's S3 resource with what our sources need beside: path style, and checksums only where a service asks for them.

In a module of its own because loading dagster_aws takes as long as Dagster itself. Not here: what is asked of S3 (`s3`).
"""

from typing import Any, Self

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from dagster import ResourceDependency
from dagster_aws.s3 import S3Resource
from pydantic import SecretStr

from caf_pipeline.settings import SourceSettings


class S3SourceResource(S3Resource):
    """The S3 client of one source.

    Keys come from `source`, not from the resource's config, which Dagster would show; without any, boto3's own chain finds
    them.
    """

    source: ResourceDependency[SourceSettings]

    @classmethod
    def of(cls, source: SourceSettings, *, attempts: int) -> Self:
        """Return the resource of a source; `attempts` counts the first request of each call."""
        return cls(
            source=source,
            endpoint_url=source.endpoint_url or None,
            region_name=source.region or None,
            profile_name=source.profile or None,
            use_unsigned_session=source.anonymous,
            max_attempts=attempts,
        )

    def get_client(self) -> Any:  # noqa: ANN401 - boto3's clients have no type of their own
        """Return a boto3 client for the source's bucket."""
        session = boto3.Session(
            profile_name=self.profile_name,
            region_name=self.region_name,
            aws_access_key_id=_revealed(self.source.access_key_id),
            aws_secret_access_key=_revealed(self.source.secret_access_key),
        )
        config = Config(
            signature_version=UNSIGNED if self.use_unsigned_session else None,
            retries={"mode": "standard", "max_attempts": self.max_attempts},
            s3={"addressing_style": "path" if self.source.uses_path_style else "auto"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return session.client("s3", endpoint_url=self.endpoint_url, config=config)


def _revealed(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret else None
