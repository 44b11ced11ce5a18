"""The S3 resource of one source, with its client's settings as fields."""

from typing import TYPE_CHECKING, Any, Self

from dagster import ConfigurableResource, InitResourceContext, ResourceDependency
from pydantic import Field, create_model

from caf_pipeline.settings import SourceSettings

if TYPE_CHECKING:
    from dagster_aws.s3 import S3Resource


class S3SourceResource(ConfigurableResource["S3Resource"]):
    """A source's S3 access, by default as caf.toml configures it.

    A value that is given at launch applies to that run. A step gets a `dagster_aws.s3.S3Resource`.
    It is made when the step begins: dagster-aws takes 0.6 s of CPU to load.

    Access keys are not fields, since Dagster displays all field values. They come from the
    environment or from boto3's own sources.
    """

    use_unsigned_session: bool = Field(default=False, description="Send requests without keys.")
    region_name: str | None = Field(default=None, description="Region of the bucket.")
    endpoint_url: str | None = Field(default=None, description="Endpoint. Default: of AWS.")
    max_attempts: int = Field(
        default=1, description="boto3's attempts of a request. The source repeats requests itself."
    )
    profile_name: str | None = Field(default=None, description="Profile of the AWS tools.")
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

    def create_resource(self, context: InitResourceContext) -> "S3Resource":
        from caf_pipeline.defs.source_s3 import SourceS3

        return SourceS3(
            use_unsigned_session=self.use_unsigned_session,
            region_name=self.region_name,
            endpoint_url=self.endpoint_url,
            max_attempts=self.max_attempts,
            profile_name=self.profile_name,
            path_style=self.path_style,
            source=self.source,
        )
