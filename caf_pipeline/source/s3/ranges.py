"""Random access to an archive at `s3://bucket/key`, by range requests on one object.

Uses boto3's credentials from the environment, or none.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError
from pydantic import ValidationError

from caf_pipeline.errors import ArchiveError, BucketMissing, SourceUnreachable, UsageError
from caf_pipeline.settings import SourceSettings
from caf_pipeline.source.s3.clients import (
    ENDPOINT_VARIABLES,
    address_error,
    build_client,
    endpoint_of_environment,
)
from caf_pipeline.source.s3.errors import code_of, status_of
from caf_pipeline.system.ranges import RangeAnswer, RemoteFile, parse_range, refused, unreachable


class S3File(RemoteFile):
    """An object at an `s3://` address."""

    def __init__(self, url: str) -> None:
        self._bucket, _, self._key = url.removeprefix("s3://").partition("/")
        if not self._bucket or not self._key:
            raise UsageError(f"{url!r} names no object.", hint="Give s3://bucket/key.")
        super().__init__(url)
        try:
            settings = SourceSettings(bucket=self._bucket, endpoint_url=endpoint_of_environment())
        except ValidationError as error:
            raise address_error(
                error, f"{self.name} cannot be requested", endpoint_from=ENDPOINT_VARIABLES
            ) from error
        anonymous = boto3.Session().get_credentials() is None
        self._client = build_client(settings.model_copy(update={"anonymous": anonymous}))
        self._conditions: dict[str, Any] = {}

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _request(self, byte_range: str) -> Iterator[RangeAnswer]:
        try:
            response: Any = self._client.get_object(
                Bucket=self._bucket, Key=self._key, Range=byte_range, **self._conditions
            )
        except ParamValidationError as error:
            raise UsageError(f"{self.name} cannot be requested: {error}.") from error
        except ClientError as error:
            if code_of(error) == "InvalidRange":  # only an empty object has no last bytes
                yield RangeAnswer(0, 0, False, lambda _: iter(()))
                return
            if code_of(error) == "NoSuchBucket":
                raise BucketMissing(
                    f"There is no bucket {self._bucket!r}.",
                    hint=f"Check the name and {ENDPOINT_VARIABLES}.",
                ) from error
            raise refused(self.name, status_of(error), code_of(error)) from error
        except BotoCoreError as error:
            raise unreachable(
                self.name, error, self._client.meta.endpoint_url, hint="Check endpoint and network."
            ) from error
        # Later requests can be pinned to the same content by its ETag only.
        if etag := response.get("ETag"):
            self._conditions = self._conditions or {"IfMatch": etag}
        with closing(response["Body"]) as body:
            yield self._part(response, body)

    def _part(self, response: Mapping[str, Any], body: Any) -> RangeAnswer:  # noqa: ANN401 - botocore's body has no public type
        def pieces(piece_bytes: int) -> Iterator[bytes]:
            try:
                yield from body.iter_chunks(piece_bytes)
            except BotoCoreError as error:
                raise SourceUnreachable(f"{self.name}: the connection broke: {error}.") from error

        if "ContentRange" not in response:
            if "ContentLength" not in response:
                raise ArchiveError(
                    f"{self.name}: the server does not say how large it is.",
                    hint="Download it, and give the local file.",
                )
            return RangeAnswer(0, response["ContentLength"], True, pieces)
        first_byte, size_bytes = parse_range(self.name, response["ContentRange"])
        return RangeAnswer(first_byte, size_bytes, False, pieces)
