"""boto3's client of a source, for listings, HEADs and control calls; that of the GETs is made of
it.
"""

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
"""Where an endpoint is given and no region: servers other than AWS take any, and this is what they
are set to.
"""

CONNECTIONS: Final = 64
"""Kept by boto3; more threads than that are not worth it on one machine."""

CONNECT_TIMEOUT: Final = timedelta(seconds=10)
READ_TIMEOUT: Final = timedelta(seconds=60)  # between two reads, as botocore's own

_PROFILE: Final = "the source's profile or AWS_PROFILE"
_ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
ENDPOINT_VARIABLES: Final = " or ".join(_ENDPOINT_VARIABLES)

QUEUE_ATTEMPTS: Final = 2
"""Of one request to a queue, the first included: the next tick asks again."""

_QUEUE_HOST: Final = re.compile(
    r"(?:sqs|queue)[.]([a-z0-9-]+)[.](?:amazonaws[.]com|api[.]aws)(?:[.]cn)?"
)

CA_BUNDLE: Final = "AWS_CA_BUNDLE"
"""The AWS tools' own variable: a file of certificates to trust."""


def build_client(
    settings: SourceSettings, *, attempts: int = 1, profile_from: str = _PROFILE
) -> S3Client:
    """Return a boto3 client as the settings ask; nothing is asked of the network.

    `attempts` are those of one request by boto3 itself, the first included; `S3Source` has its own
    and wants one. `profile_from` says where the profile comes from.

    Raises:
        SettingsError: a setting is of no use.
    """
    config = Config(
        signature_version=UNSIGNED if settings.anonymous else None,
        retries={"mode": "standard", "total_max_attempts": attempts},
        s3={"addressing_style": "path" if settings.uses_path_style else "auto"},
        # servers other than AWS do not know the newer checksums
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
        client.meta.events.register("before-parameter-build.s3", _stay)
    return client


@cache
def build_queue_client(settings: SourceSettings) -> Any:  # noqa: ANN401 - boto3's clients have no type of their own
    """Return a client for the source's queue, at the address that the queue's URL has; nothing is
    asked of the network.

    Raises:
        SettingsError: a setting is of no use.
    """
    config = Config(
        retries={"mode": "standard", "total_max_attempts": QUEUE_ATTEMPTS},
        connect_timeout=CONNECT_TIMEOUT.total_seconds(),
        # within a tick's deadline, or nothing is known of the answer
        read_timeout=CONNECT_TIMEOUT.total_seconds(),
    )
    url = urlsplit(settings.queue)
    of_aws = _QUEUE_HOST.fullmatch(url.hostname or "")
    with _configured():
        session = _session(settings)
        region = of_aws[1] if of_aws else session.region_name or DEFAULT_REGION
        return session.client(
            "sqs", region_name=region, endpoint_url=f"{url.scheme}://{url.netloc}", config=config
        )


def _session(settings: SourceSettings) -> boto3.Session:
    return boto3.Session(
        botocore_session=_botocore_session(settings.profile or None),
        region_name=settings.region or None,
        aws_access_key_id=_revealed(settings.access_key_id),
        aws_secret_access_key=_revealed(settings.secret_access_key),
    )


@contextmanager
def _configured(profile_from: str = _PROFILE) -> Iterator[None]:
    """Raise SettingsError for what boto3 says of a configuration that is of no use."""
    try:
        yield
    except ProfileNotFound as error:
        raise SettingsError(
            f"there is no profile '{error.kwargs['profile']}' in the AWS configuration",
            hint=f"correct {profile_from}; `aws configure list-profiles` names them",
        ) from error
    except PartialCredentialsError as error:
        raise SettingsError(
            f"only one half of the credentials was found: {error.kwargs['cred_var']} is missing "
            f"({error.kwargs['provider']})",
            hint="set both of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or neither",
        ) from error
    except (ValueError, BotoCoreError) as error:
        # What the settings say was checked when they were read; this is the environment's.
        raise SettingsError(
            f"the AWS configuration cannot be used: {str(error).rstrip('.')}",
            hint="check AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3, AWS_DEFAULT_REGION and the files in "
            "~/.aws",
        ) from error


def _botocore_session(profile: str | None) -> botocore.session.Session:
    session = botocore.session.Session(profile=profile)
    session.register_component(
        "data_loader", _api_descriptions(session.get_config_variable("data_path"))
    )
    return session


@cache
def _api_descriptions(data_path: str | None) -> Loader:
    """Return botocore's descriptions of AWS, kept: reading them takes seven times as long as the
    rest of a client.
    """
    return create_loader(data_path)


def _stay(context: dict[str, Any], **_: object) -> None:
    """Take a redirect as an answer: a server that is not AWS has no regions, and botocore would ask
    it for one without end.
    """
    context.setdefault("s3_redirect", {})["redirected"] = True


def _revealed(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret else None


def endpoint_of_environment() -> str:
    """Return the endpoint that the AWS tools' own variables name, "" where they name none."""
    return next(filter(None, map(os.environ.get, _ENDPOINT_VARIABLES)), "")


def unusable(
    error: ValidationError, what: str, *, hint: str = "", endpoint_from: str
) -> UsageError:
    """Return the error of an address of AWS' form, or of the endpoint given beside it, which may
    hold a password.

    `what` is the sentence's beginning, `hint` what to do about the address, `endpoint_from` says
    where the endpoint comes from.
    """
    first = error.errors()[0]
    said = first["msg"].removeprefix("Value error, ")
    if first["loc"] == ("endpoint_url",):
        return UsageError(
            f"the address of the bucket's server cannot be used: it {said}",
            hint=f"correct {endpoint_from}",
        )
    return UsageError(f"{what}: {said}", hint=hint)


def is_aws(client: S3Client) -> bool:
    """Tell whether the client speaks to AWS itself."""
    host = urlsplit(client.meta.endpoint_url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def bucket_region(client: S3Client, bucket: str) -> str | None:
    """Ask AWS which region a bucket is in; None where it does not say. boto3 follows redirects,
    awscrt does not.
    """
    try:
        answer: Any = client.head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = (
            error.response
        )  # a refusal names the region too; what it refuses, the listing says better
    except BotoCoreError:
        return None  # whatever it is, the listing meets it again and says it
    region: str | None = (
        answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    )
    return region
