"""Dagster's S3 resource of one source: its client is the one that the source's settings describe.

In a module of its own because loading dagster_aws takes longer than loading Dagster.
"""

from functools import cache
from typing import Any, Self

from dagster import ResourceDependency
from dagster_aws.s3 import S3Resource

from caf_pipeline.settings import SourceSettings
from caf_pipeline.source.s3.clients import build_client


class S3SourceResource(S3Resource):
    """The S3 client of one source: path style, checksums only where a service asks for them, retries left to the source.

    Keys come from `source`, not from the resource's config, which Dagster would show.
    """

    source: ResourceDependency[SourceSettings]

    @classmethod
    def of(cls, source: SourceSettings) -> Self:
        """Return the resource of a source."""
        return cls(
            source=source,
            endpoint_url=source.endpoint_url or None,
            region_name=source.region or None,
            profile_name=source.profile or None,
            use_unsigned_session=source.anonymous,
        )

    def get_client(self) -> Any:  # noqa: ANN401 - boto3's clients have no type of their own
        """Return a boto3 client for the source's bucket, the same for all runs of this process."""
        return _client(self.source)


@cache  # a client is safe in threads and renews its credentials; making one reads 2 MB of JSON, a third of a second
def _client(source: SourceSettings) -> Any:  # noqa: ANN401
    return build_client(source)
