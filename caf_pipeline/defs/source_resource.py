"""The S3 resource of one source, with its client's settings as fields."""

from functools import cache
from typing import Any, ClassVar, Self

from dagster import ResourceDependency
from dagster_aws.s3 import S3Resource
from pydantic import Field, create_model

from caf_pipeline.settings import SourceSettings
from caf_pipeline.source.s3.clients import build_client


class S3SourceResource(S3Resource):
    """A source's S3 access, by default as caf.toml configures it.

    A value that is given at launch applies to that run.

    Access keys are not fields, since Dagster displays all field values. They come from the
    environment or from boto3's own sources.
    """

    aws_access_key_id: ClassVar[None] = None  # type: ignore[misc]
    aws_secret_access_key: ClassVar[None] = None  # type: ignore[misc]
    aws_session_token: ClassVar[None] = None  # type: ignore[misc]
    use_ssl: ClassVar[bool] = True  # type: ignore[misc]  # by the endpoint's scheme
    verify: ClassVar[None] = None  # type: ignore[misc]
    path_style: bool = Field(
        default=False, description="Name the bucket in the path of a request, not in the host name."
    )
    source: ResourceDependency[SourceSettings]

    @classmethod
    def of(cls, source: SourceSettings) -> Self:
        """Return the resource of a source, as an instance of a generated class.

        The settings are the class's defaults: a launch that sets any field drops an instance's
        values.
        """
        values: dict[str, Any] = {
            "endpoint_url": source.endpoint_url or None,
            "region_name": source.region or None,
            "profile_name": source.profile or None,
            "use_unsigned_session": source.anonymous,
            "path_style": source.uses_path_style,
            "max_attempts": 1,  # `S3Source` retries; boto3's attempts would multiply
        }
        fields = {name: cls.model_fields[name] for name in values}
        defaults: dict[str, Any] = {
            name: (field.annotation, Field(default=values[name], description=field.description))
            for name, field in fields.items()
        }
        source_class: type[Self] = create_model(
            cls.__name__, __base__=cls, __module__=cls.__module__, **defaults
        )
        return source_class(source=source)

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
