"""The type of boto3's S3 client; its stubs are a development dependency only."""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import mypy_boto3_s3.client as stubs

    S3Client: TypeAlias = stubs.S3Client
else:
    S3Client = Any
