"""Dagster's S3 resource of one source: what its fields say makes the client that lists and reads
the bucket.
"""

from functools import cache
from typing import Any, ClassVar, Self

from dagster import ResourceDependency
from dagster_aws.s3 import S3Resource
from pydantic import Field, create_model

from caf_pipeline.settings import SourceSettings
from caf_pipeline.source.s3.clients import build_client


class S3SourceResource(S3Resource):
    """A source's S3, with its settings in caf.toml as values.

    Another value at launch holds for that run.

    Keys are no fields, since Dagster shows the values of all: they come from the settings'
    environment, else from where boto3 looks for them. `AWS_CA_BUNDLE` names the certificates to
    trust.
    """

    aws_access_key_id: ClassVar[None] = None  # type: ignore[misc]
    aws_secret_access_key: ClassVar[None] = None  # type: ignore[misc]
    aws_session_token: ClassVar[None] = None  # type: ignore[misc]
    use_ssl: ClassVar[bool] = True  # type: ignore[misc]  # the endpoint's scheme says it
    verify: ClassVar[None] = None  # type: ignore[misc]
    path_style: bool = Field(
        default=False, description="Specifies whether requests name the bucket in the path."
    )
    source: ResourceDependency[SourceSettings]

    @classmethod
    def of(cls, source: SourceSettings) -> Self:
        """Return the resource of a source.

        Its settings are the defaults of the fields, of a class of its own: of values given to an
        instance, Dagster takes none where a launch gives any.
        """
        values: dict[str, Any] = {
            "endpoint_url": source.endpoint_url or None,
            "region_name": source.region or None,
            "profile_name": source.profile or None,
            "use_unsigned_session": source.anonymous,
            "path_style": source.uses_path_style,
            "max_attempts": 1,  # `S3Source` has its own; boto3's would multiply with them
        }
        fields = {name: cls.model_fields[name] for name in values}
        defaults: dict[str, Any] = {
            name: (field.annotation, Field(default=values[name], description=field.description))
            for name, field in fields.items()
        }
        its: type[Self] = create_model(
            cls.__name__, __base__=cls, __module__=cls.__module__, **defaults
        )
        return its(source=source)

    def get_client(self) -> Any:  # noqa: ANN401 - boto3's clients have no type of their own
        """Return a boto3 client for the source's bucket, the same for all runs of this process."""
        values = {
            "endpoint_url": self.endpoint_url or "",
            "region": self.region_name or "",
            "profile": self.profile_name or "",
            "anonymous": self.use_unsigned_session,
            "path_style": self.path_style,
        }
        return _client(self.source.model_copy(update=values), self.max_attempts)

    def get_object_to_set_on_execution_context(self) -> Self:
        """Return the resource where Dagster's own returns a client, whose error would then come
        before the step begins.
        """
        return self


# a client is safe in threads and renews its credentials; making one reads 2 MB of JSON, a third of
# a second
@cache
def _client(source: SourceSettings, attempts: int) -> Any:  # noqa: ANN401
    return build_client(source, attempts=attempts)
