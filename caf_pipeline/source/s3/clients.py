"""The two clients of a source: boto3's for control calls, listings and odd keys, obstore's for the bulk of the GETs.

Both speak to the same endpoint with the same credentials and trust the same certificates: the second is made of the first, and
takes nothing else from the environment.
"""

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError, ClientError, PartialCredentialsError, ProfileNotFound
from botocore.loaders import Loader, create_loader
from botocore.utils import check_dns_name
from obstore.store import S3Store
from pydantic import SecretStr

from caf_pipeline.errors import SettingsError
from caf_pipeline.settings import SourceSettings

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from obstore.store import ClientConfig, S3Credential

DEFAULT_REGION: Final = "us-east-1"
"""Where an endpoint is given and no region: servers other than AWS take any, and this is what they are set to."""

CONNECTIONS: Final = 64
"""Kept by boto3; more threads than that are not worth it on one machine."""

CONNECT_TIMEOUT: Final = timedelta(seconds=10)
READ_TIMEOUT: Final = timedelta(seconds=60)  # between two reads, as botocore's own
REQUEST_TIMEOUT: Final = timedelta(minutes=15)  # a part of 64 MiB at 75 KB/s; obstore's own 30 s would cut slow lines off

CA_BUNDLE: Final = "AWS_CA_BUNDLE"
"""The AWS tools' own variable: a file of certificates to trust."""

CREDENTIALS_KEPT: Final = timedelta(minutes=5)
"""How long obstore keeps temporary credentials. botocore renews them when 15 minutes are left, at the latest at 10."""

_QUICK_RETRIES: Final = {
    # A connection that was closed while idle, a single 503. What lasts longer is for the retries of `get`, which see
    # S3's code; obstore's own default of 10 retries and 180 s would multiply with them.
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
}


def build_client(settings: SourceSettings, *, attempts: int = 1) -> "S3Client":
    """Return a boto3 client as the settings ask; nothing is asked of the network.

    `attempts` are those of one request by boto3 itself, the first included; `S3Source` has its own and wants one.

    Raises:
        SettingsError: a setting is of no use.
    """
    config = Config(
        signature_version=UNSIGNED if settings.anonymous else None,
        retries={"mode": "standard", "total_max_attempts": attempts},
        s3={"addressing_style": "path" if settings.uses_path_style else "auto"},
        request_checksum_calculation="when_required",  # servers other than AWS do not know the newer checksums
        response_checksum_validation="when_required",
        connect_timeout=CONNECT_TIMEOUT.total_seconds(),
        read_timeout=READ_TIMEOUT.total_seconds(),
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
    )
    try:
        session = boto3.Session(
            botocore_session=_botocore_session(settings.profile or None),
            region_name=settings.region or None,
            aws_access_key_id=_revealed(settings.access_key_id),
            aws_secret_access_key=_revealed(settings.secret_access_key),
        )
        region = session.region_name or DEFAULT_REGION
        client = session.client("s3", region_name=region, endpoint_url=settings.endpoint_url or None, config=config)
    except ProfileNotFound as error:
        raise SettingsError(
            f"there is no profile '{error.kwargs['profile']}' in the AWS configuration",
            hint="correct the source's profile or AWS_PROFILE; `aws configure list-profiles` names them",
        ) from error
    except PartialCredentialsError as error:
        raise SettingsError(
            f"only one half of the credentials was found: {error.kwargs['cred_var']} is missing ({error.kwargs['provider']})",
            hint="set both of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or neither",
        ) from error
    except (ValueError, BotoCoreError) as error:
        # What the settings say was checked when they were read; this is the environment's.
        raise SettingsError(
            f"the AWS configuration cannot be used: {str(error).rstrip('.')}",
            hint="check AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3, AWS_DEFAULT_REGION and the files in ~/.aws",
        ) from error
    if settings.endpoint_url:
        client.meta.events.register("before-parameter-build.s3", _stay)
    return client


def _botocore_session(profile: str | None) -> botocore.session.Session:
    session = botocore.session.Session(profile=profile)
    session.register_component("data_loader", _api_descriptions(session.get_config_variable("data_path")))
    return session


@cache
def _api_descriptions(data_path: str | None) -> Loader:
    """Return botocore's descriptions of AWS, kept: reading them takes seven times as long as the rest of a client."""
    return create_loader(data_path)


def _stay(context: dict[str, Any], **_: object) -> None:
    """Take a redirect as an answer: a server that is not AWS has no regions, and botocore would ask it for one without end."""
    context.setdefault("s3_redirect", {})["redirected"] = True


def _revealed(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret else None


def build_store(client: "S3Client", bucket: str, *, requester_pays: bool = False, region: str | None = None) -> S3Store:
    """Return obstore's client for what a boto3 client is for.

    The client says endpoint, path style and credentials; `region` is the bucket's, where it is another than the client's.

    Raises:
        SettingsError: AWS_CA_BUNDLE names a file that cannot be read.
    """
    endpoint = client.meta.endpoint_url
    if region and is_aws(client):
        # boto3 uses the endpoint without a region for us-east-1.
        endpoint = endpoint.replace("//s3.amazonaws.", f"//s3.{region}.amazonaws.").replace(
            f".{client.meta.region_name}.", f".{region}."
        )
    virtual = _style(client) != "path" and check_dns_name(bucket) and "." not in bucket
    if virtual:
        scheme, rest = endpoint.split("://", 1)
        endpoint = f"{scheme}://{bucket}.{rest}"
    unsigned = getattr(client.meta.config, "signature_version", None) is UNSIGNED
    options: dict[str, Any] = {} if unsigned else {"credential_provider": credential_provider(client)}
    return S3Store(
        bucket,
        # Everything that the environment might say otherwise is said here, the endpoint by both its names.
        config={
            "endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,
            "region": region or client.meta.region_name,
            "virtual_hosted_style_request": virtual,
            "skip_signature": unsigned,
            "request_payer": requester_pays,
            "s3_express": False,
        },
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": CONNECT_TIMEOUT,
            "read_timeout": READ_TIMEOUT,
            "timeout": REQUEST_TIMEOUT,
            **_trusted(),
        },
        retry_config=_QUICK_RETRIES,  # type: ignore[arg-type]
        **options,
    )


def _trusted() -> "ClientConfig":
    """Return the certificates that boto3 is told to trust, which obstore does not look for."""
    path = os.environ.get(CA_BUNDLE)
    try:
        return {"root_certificate": Path(path).read_bytes()} if path else {}
    except OSError as error:
        raise SettingsError(f"{CA_BUNDLE} names {path}, which cannot be read: {error.strerror}") from error


def _style(client: "S3Client") -> str:
    return str((getattr(client.meta.config, "s3", None) or {}).get("addressing_style", "auto"))


def credential_provider(client: "S3Client") -> "Callable[[], S3Credential]":
    """Return what hands obstore the client's own credentials, renewed where they are temporary.

    obstore reads no profiles, and its own provider for boto3 wants a session and keeps credentials for 30 minutes, longer
    than botocore promises them.
    """
    credentials = client._get_credentials()  # type: ignore[attr-defined]  # there is no public way from a client to them

    def current() -> "S3Credential":
        if credentials is None:
            raise LookupError("there are no credentials")  # obstore fails, and boto3 then says it in its own words
        frozen = credentials.get_frozen_credentials()
        temporary = isinstance(credentials, RefreshableCredentials)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + CREDENTIALS_KEPT if temporary else None,
        }

    return current


def is_aws(client: "S3Client") -> bool:
    """Tell whether the client speaks to AWS itself."""
    host = urlsplit(client.meta.endpoint_url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def bucket_region(client: "S3Client", bucket: str) -> str | None:
    """Ask AWS which region a bucket is in; None where it does not say. boto3 follows redirects, obstore does not."""
    try:
        answer: Any = client.head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response  # a refusal names the region too; what it refuses, the listing says better
    except BotoCoreError:
        return None  # whatever it is, the listing meets it again and says it
    region: str | None = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    return region
