"""boto3 clients for listings, HEADs, queues and control calls."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, Final
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, PartialCredentialsError, ProfileNotFound
from botocore.loaders import Loader, create_loader
from pydantic import SecretStr, ValidationError

from caf_pipeline.errors import SettingsError, UsageError
from caf_pipeline.settings import SourceSettings
from caf_pipeline.source.s3.client_type import S3Client
from caf_pipeline.source.s3.listing_entries import read_entries

DEFAULT_REGION: Final = "us-east-1"
"""Servers other than AWS default to it, and accept any."""

CONNECTIONS: Final = 64
"""More threads do not pay on one machine."""

CONNECT_TIMEOUT: Final = timedelta(seconds=10)
READ_TIMEOUT: Final = timedelta(seconds=60)  # between two reads; botocore's default

_PROFILE: Final = "the source's profile or AWS_PROFILE"
_ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
ENDPOINT_VARIABLES: Final = " or ".join(_ENDPOINT_VARIABLES)

QUEUE_ATTEMPTS: Final = 2
"""The next tick asks again."""

_QUEUE_HOST: Final = re.compile(
    r"(?:sqs|queue)[.]([a-z0-9-]+)[.](?:amazonaws[.]com|api[.]aws)(?:[.]cn)?"
)

CA_BUNDLE: Final = "AWS_CA_BUNDLE"


def build_client(
    settings: SourceSettings, *, attempts: int = 1, profile_from: str = _PROFILE
) -> S3Client:
    """Return a boto3 client, without a network request; raises SettingsError.

    `S3Source` retries by itself and needs one attempt of boto3.
    """
    config = Config(
        signature_version=UNSIGNED if settings.anonymous else None,
        retries={"mode": "standard", "total_max_attempts": attempts},
        s3={"addressing_style": "path" if settings.uses_path_style else "auto"},
        # Servers other than AWS do not support the newer checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        connect_timeout=CONNECT_TIMEOUT.total_seconds(),
        read_timeout=READ_TIMEOUT.total_seconds(),
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
    )
    with _configured(profile_from):
        session = _session(settings)
        region = session.region_name or DEFAULT_REGION
        client = session.client(
            "s3", region_name=region, endpoint_url=settings.endpoint_url or None, config=config
        )
    read_entries(client)
    if settings.endpoint_url:
        # A server that is not AWS has no regions, and botocore would ask it for one forever.
        client.meta.events.register(
            "before-parameter-build.s3",
            lambda context, **_: context.setdefault("s3_redirect", {}).update(redirected=True),
        )
    return client


@cache
def build_queue_client(settings: SourceSettings) -> Any:  # noqa: ANN401 - boto3's clients have no type of their own
    """Return a client for the queue's URL, without a request; raises SettingsError."""
    config = Config(
        retries={"mode": "standard", "total_max_attempts": QUEUE_ATTEMPTS},
        connect_timeout=CONNECT_TIMEOUT.total_seconds(),
        # The answer must come within the tick's deadline.
        read_timeout=CONNECT_TIMEOUT.total_seconds(),
    )
    url = urlsplit(settings.queue)
    aws_host = _QUEUE_HOST.fullmatch(url.hostname or "")
    with _configured():
        session = _session(settings)
        region = aws_host[1] if aws_host else session.region_name or DEFAULT_REGION
        return session.client(
            "sqs", region_name=region, endpoint_url=f"{url.scheme}://{url.netloc}", config=config
        )


def _session(settings: SourceSettings) -> boto3.Session:
    session = botocore.session.Session(profile=settings.profile or None)
    data_path = session.get_config_variable("data_path")
    session.register_component("data_loader", _api_descriptions(data_path))
    return boto3.Session(
        botocore_session=session,
        region_name=settings.region or None,
        aws_access_key_id=_revealed(settings.access_key_id),
        aws_secret_access_key=_revealed(settings.secret_access_key),
    )


@contextmanager
def _configured(profile_from: str = _PROFILE) -> Iterator[None]:
    try:
        yield
    except ProfileNotFound as error:
        raise SettingsError(
            f"there is no profile '{error.kwargs['profile']}' in the AWS configuration",
            hint=f"correct {profile_from}; `aws configure list-profiles` lists the profiles",
        ) from error
    except PartialCredentialsError as error:
        raise SettingsError(
            f"the credentials are incomplete: {error.kwargs['cred_var']} is missing "
            f"({error.kwargs['provider']})",
            hint="set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or neither",
        ) from error
    except (ValueError, BotoCoreError) as error:
        # The settings were checked when they were loaded, so the environment is at fault.
        raise SettingsError(
            f"the AWS configuration cannot be used: {str(error).rstrip('.')}",
            hint="check AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3, AWS_DEFAULT_REGION and the files in "
            "~/.aws",
        ) from error


@cache
def _api_descriptions(data_path: str | None) -> Loader:
    """Cached: loading takes seven times as long as the rest of creating a client."""
    return create_loader(data_path)


def _revealed(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret else None


def endpoint_of_environment() -> str:
    """Return the endpoint in the AWS tools' own variables, or ""."""
    return next(filter(None, map(os.environ.get, _ENDPOINT_VARIABLES)), "")


def address_error(
    error: ValidationError, what: str, *, hint: str = "", endpoint_from: str
) -> UsageError:
    """Return the error for an invalid address or endpoint, which may hold a password."""
    first = error.errors()[0]
    reason = first["msg"].removeprefix("Value error, ")
    if first["loc"] == ("endpoint_url",):
        return UsageError(
            f"the address of the bucket's server cannot be used: it {reason}",
            hint=f"correct {endpoint_from}",
        )
    return UsageError(f"{what}: {reason}", hint=hint)


def is_aws(client: S3Client) -> bool:
    """Return whether the endpoint is AWS itself."""
    host = urlsplit(client.meta.endpoint_url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def bucket_region(client: S3Client, bucket: str) -> str | None:
    """Return a bucket's AWS region, or None if AWS does not report it.

    boto3 follows redirects to another region; awscrt does not.
    """
    try:
        answer: Any = client.head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response  # a refusal names the region, too
    except BotoCoreError:
        return None  # the listing meets the same error and reports it
    region: str | None = (
        answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    )
    return region
