"""The S3 access of a step: dagster-aws's resource, with the client that a source needs."""

from functools import cache
from typing import Any, Self

from dagster import ResourceDependency
from dagster_aws.s3 import S3Resource

from caf_pipeline.settings import SourceSettings
from caf_pipeline.source.s3.clients import build_client


class SourceS3(S3Resource):
    """dagster-aws's resource with the timeouts, keys and checksums of `source`."""

    path_style: bool
    source: ResourceDependency[SourceSettings]

    def get_client(self) -> Any:  # noqa: ANN401 - boto3 has no type for clients
        """Return a boto3 client, which all runs of this process share."""
        values = {
            "endpoint_url": self.endpoint_url or "",
            "region": self.region_name or "",
            "profile": self.profile_name or "",
            "anonymous": self.use_unsigned_session,
            "path_style": self.path_style,
        }
        return _client(self.source.model_copy(update=values), self.max_attempts)

    def get_object_to_set_on_execution_context(self) -> Self:
        """Return the resource itself, so that a client's error is raised within the step."""
        return self


# Clients are thread-safe and renew their credentials. Creating one takes a third of a second.
@cache
def _client(source: SourceSettings, attempts: int) -> Any:  # noqa: ANN401
    return build_client(source, attempts=attempts)
