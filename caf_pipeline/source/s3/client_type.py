"""The type of boto3's S3 client, which only a type checker has: the stubs are not installed with
this package.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import mypy_boto3_s3.client as stubs

    S3Client: TypeAlias = stubs.S3Client
else:
    S3Client = Any
