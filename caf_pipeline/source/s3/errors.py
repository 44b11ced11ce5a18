"""The meaning of S3's answers: errors, skip reasons and what is retried, by code or status.

Source: "List of error codes" in the Amazon S3 API Reference; botocore's list of transient codes.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeVar

from awscrt.exceptions import AwsCrtError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    LoginError,
    NoAuthTokenError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from caf_pipeline.errors import (
    BucketMissing,
    CafError,
    ListingRefused,
    ObjectReadFailed,
    ObjectUnavailable,
    SettingsError,
    SourceDenied,
    SourceError,
    SourceUnreachable,
    first_line,
)
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.system.unreachable import Reason, hint_for, reason_of, speaks_only_tls
from caf_pipeline.waits import UNANSWERED_SECONDS, OpenWait, Waits

FIRST_WAIT_SECONDS: Final = 0.25
MAX_WAIT_SECONDS: Final = 20.0
"""botocore's limit. Random waits are at most FIRST_WAIT_SECONDS, doubled each time."""

T = TypeVar("T")


_CRT_MESSAGES: Final = {
    # awscrt drops S3's message and status from these errors.
    "AWS_ERROR_S3_INTERNAL_ERROR": (
        "the server has an internal error (InternalError, or HTTP status 500, 502 or 504)"
    ),
    "AWS_ERROR_S3_SLOW_DOWN": "the server asks for fewer requests (SlowDown, or HTTP status 503)",
    "AWS_ERROR_S3_REQUEST_TIMEOUT": "the server received the request too late (RequestTimeout)",
    # The answer is not what was requested.
    "AWS_ERROR_DEST_COPY_TOO_SMALL": "the answer has more bytes than were requested",
    "AWS_ERROR_S3_MISSING_ETAG": "the answer has no ETag",
    "AWS_ERROR_S3_MISSING_CONTENT_RANGE_HEADER": "the answer has no Content-Range",
    "AWS_ERROR_S3_INVALID_CONTENT_RANGE_HEADER": "the answer has an invalid Content-Range",
}


class WrongBody(Exception):
    """A body of a wrong length or object. It is read again."""


class InvalidXml(Exception):
    """An answer with a status of success whose body is not valid S3 XML.

    `has_doctype`: entity bombs and XXE need a document type declaration; S3 sends none.
    """

    def __init__(self, wrong: str, *, is_page: bool, has_doctype: bool = False) -> None:
        super().__init__(wrong)
        self.is_page = is_page
        self.has_doctype = has_doctype


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """The source, bucket and server URL that errors name."""

    source: str
    bucket: str
    endpoint: str

    def __str__(self) -> str:
        return f"bucket '{self.bucket}' at {self.endpoint}"

    def of(self, key: bytes) -> str:
        return f"s3://{self.bucket}/{key.decode('utf-8', 'backslashreplace')}"

    def setting(self, name: str) -> str:
        return f"sources.{self.source or '<name>'}.{name}"

    @property
    def credentials_hint(self) -> str:
        keys = f"{self._variable_prefix}ACCESS_KEY_ID and {self._variable_prefix}SECRET_ACCESS_KEY"
        how = " (with 'env', since shell variables cannot have '-')" if "-" in self.source else ""
        return (
            f"set {keys}{how}, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            f"{self.setting('profile')}, or anonymous = true for a public bucket"
        )

    def key_hint(self, name: str) -> str:
        return f"{self._variable_prefix}{name}, or else AWS_{name} or the profile"

    @property
    def _variable_prefix(self) -> str:

        return f"CAF_SOURCES__{(self.source or '<name>').upper()}__"


_CREDENTIALS: Final = frozenset(
    {
        "AccountProblem",
        "AllAccessDisabled",
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSecurity",
        "InvalidToken",
        "MissingAuthenticationToken",
        "MissingSecurityHeader",
        "NotSignedUp",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)

_NO_CREDENTIALS: Final = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    TokenRetrievalError,
    NoAuthTokenError,
    SSOError,
    LoginError,
)

_REDIRECTS: Final = frozenset(
    {"PermanentRedirect", "TemporaryRedirect", "IllegalLocationConstraintException", "301", "307"}
)
_EXPECTED_REGION: Final = re.compile(r"expecting '([a-z0-9-]{1,63})'")
_REGION: Final = re.compile(r"[a-z0-9-]{1,63}")

_REASONS: Final[dict[str, SkipReason]] = {
    "PreconditionFailed": SkipReason.CHANGED,
    "NoSuchKey": SkipReason.DELETED,
    "NoSuchVersion": SkipReason.DELETED,
    "MethodNotAllowed": SkipReason.DELETED,  # a GET of a delete marker by its version id
    "InvalidObjectState": SkipReason.COLD_STORAGE,
    "AccessDenied": SkipReason.ACCESS_DENIED,
    # The key is disabled, deleted or unknown. If only the permission to use it is missing, S3
    # answers AccessDenied.
    "KMS.DisabledException": SkipReason.NEEDS_KEY,
    "KMS.NotFoundException": SkipReason.NEEDS_KEY,
    "KMS.KMSInvalidStateException": SkipReason.NEEDS_KEY,
    "KMS.InvalidKeyUsageException": SkipReason.NEEDS_KEY,
    # Servers that answer with a status and no code.
    "412": SkipReason.CHANGED,
    "404": SkipReason.DELETED,
    "405": SkipReason.DELETED,
    "403": SkipReason.ACCESS_DENIED,
}

_DESCRIPTIONS: Final[dict[SkipReason, str]] = {
    SkipReason.CHANGED: "has changed since it was listed",
    SkipReason.DELETED: "was deleted since it was listed",
    SkipReason.COLD_STORAGE: "is in cold storage and must be restored first",
    SkipReason.ACCESS_DENIED: "may not be read with these credentials",
    SkipReason.NEEDS_KEY: "is encrypted with a key that is missing or unusable",
}

_TRANSIENT: Final = frozenset(
    {
        "InternalError",
        "OperationAborted",
        "RequestThrottled",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "TooManyRequestsException",
    }
)
_TRANSIENT_STATUS: Final = frozenset({408, 429, 500, 502, 503, 504, 509, 520, 522, 524})


def code_of(error: ClientError) -> str:
    """Return S3's error code, or the status as text. An answer to a HEAD has no code."""
    return str(error.response.get("Error", {}).get("Code") or status_of(error))


def status_of(error: ClientError) -> int:
    """Return the HTTP status, or 0."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    if isinstance(error, ClientError):
        return code_of(error) in _TRANSIENT or status_of(error) in _TRANSIENT_STATUS
    if isinstance(error, InvalidXml):
        return not error.has_doctype  # a body without one may have been truncated
    failed = isinstance(
        error, WrongBody | NoConnection | HTTPClientError | IncompleteReadError | AwsCrtError
    )
    return failed and not reason_of(error).lasts


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """How requests are retried. `attempts` includes the first."""

    at: BucketAddress
    attempts: int
    waits: Waits

    def attempt(self, call: Callable[[], T]) -> T:
        with self.waiting(UNANSWERED_SECONDS) as wait:
            answer = self.retried(call)
            wait.moved()  # concurrent requests share this wait, so one of them is always open
            return answer

    def retried(self, call: Callable[[], T]) -> T:
        """Retry transient failures of `call`, then raise the last one."""
        try:
            return call()  # usually succeeds; tenacity costs as much CPU as a small GET
        except Exception as error:
            if not is_transient(error):
                raise
            first_error = [error]

        def call_again() -> T:
            if first_error:
                raise first_error.pop()
            return call()

        return Retrying(
            stop=stop_after_attempt(self.attempts),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_SECONDS, max=MAX_WAIT_SECONDS),
            retry=retry_if_exception(is_transient),
            reraise=True,
        )(call_again)

    def waiting(self, grace: float) -> "AbstractContextManager[OpenWait]":
        what, ends_by = _waiting_texts(self.at, self.attempts)
        return self.waits.waiting(what, ends_by=ends_by, grace=grace)


@cache
def _waiting_texts(at: BucketAddress, attempts: int) -> tuple[str, str]:
    times = f"{attempts} attempts" if attempts > 1 else "one attempt"
    return (
        f"an answer of {at}, which is asked again and again",
        f"an answer ends it, or {times} without one",
    )


REQUEST_ERRORS: Final = (
    ClientError,
    BotoCoreError,
    ResponseParserError,
    AwsCrtError,
    WrongBody,
    InvalidXml,
)


def source_error(error: Exception, at: BucketAddress) -> CafError:  # noqa: PLR0911 - one for each kind
    """Return the error for a failure that concerns the whole source."""
    if general := _general_error(error, at):
        return general
    if isinstance(error, NoConnection | HTTPClientError | IncompleteReadError):
        reason = reason_of(error, at.endpoint)
        kind = SourceError if reason.lasts else SourceUnreachable
        return kind(
            f"the S3 endpoint {at.endpoint} {reason}",
            hint=hint_for(reason, at.setting("endpoint_url")) or _TRUST,
        )
    if isinstance(error, ClientError) and not is_transient(error):
        return _refusal(error, at)
    if (isinstance(error, ClientError) and code_of(error).isdigit() and _is_page(error)) or (
        isinstance(error, InvalidXml) and error.is_page
    ):
        return SourceUnreachable(
            f"the server at {at.endpoint} is not S3, or has a failure: {_PAGE}", hint=_api(at)
        )
    if isinstance(error, InvalidXml):
        kind = ListingRefused if error.has_doctype else SourceUnreachable
        return kind(f"{at} answers with a body that is not valid S3 XML: {error}", hint=_api(at))
    if isinstance(error, ClientError | WrongBody):
        what = f"answers with {code_of(error)}" if isinstance(error, ClientError) else str(error)
        return SourceUnreachable(f"{at} {what}", hint="wait, and try again")
    if isinstance(error, ResponseParserError):
        return not_s3("its answer is not S3's XML", at)
    return SourceError(f"the request to {at} failed: {first_line(error)}")


def not_s3(answer: str, at: BucketAddress) -> CafError:
    """Return the error for an endpoint whose answers are not S3's."""
    if speaks_only_tls(at.endpoint):
        return SourceError(
            f"the S3 endpoint {at.endpoint} {Reason.ONLY_TLS}",
            hint=hint_for(Reason.ONLY_TLS, at.setting("endpoint_url")),
        )
    return ListingRefused(f"the server at {at.endpoint} is not S3: {answer}", hint=_api(at))


def _api(at: BucketAddress) -> str:
    return (
        f"{at.setting('endpoint_url')} must be the address of an S3 API; many servers have a web "
        "page at another port"
    )


def _is_page(error: ClientError) -> bool:
    return "html" in _headers(error).get("content-type", "")


def _refusal(error: ClientError, at: BucketAddress) -> CafError:
    status = status_of(error)
    if code_of(error).isdigit():  # an answer without an error code of S3, or to a HEAD
        if 300 <= status < 400 and (location := _headers(error).get("location")):
            return ListingRefused(
                f"{at} redirects to {location[:200]}",
                hint=f"set {at.setting('endpoint_url')} to the address of the S3 API",
            )
        if status != 403 or _is_page(error):
            what = _PAGE if _is_page(error) else "it answers"
            return not_s3(f"{what} with HTTP status {status} and no error code of S3", at)
    if code_of(error) in ("AccessDenied", "403"):
        return SourceDenied(
            f"{at} may not be listed with these credentials",
            hint=f"grant s3:ListBucket, s3:ListBucketVersions and s3:GetObject on '{at.bucket}', "
            "or check the credentials",
        )
    return ListingRefused(
        f"{at} refuses the listing: {code_of(error)} (HTTP status {status_of(error)})",
        hint=f"check {at.setting('bucket')}, {at.setting('endpoint_url')} and the credentials",
    )


def object_error(error: Exception, at: BucketAddress, key: bytes) -> CafError:
    """Return the error for a failure to read one object."""
    if general := _general_error(error, at):
        return general
    name = at.of(key)
    if isinstance(error, ClientError):
        reason = _REASONS.get(code_of(error)) or _REASONS.get(str(status_of(error)))
        if reason is None and code_of(error) == "InvalidRequest":
            # S3 marks a missing SSE-C key only in the text: "The object was stored using a form of
            # Server Side Encryption. The correct parameters must be provided to retrieve the
            # object."
            message = str(error.response.get("Error", {}).get("Message", ""))
            if "server side encryption" in message.lower().replace("-", " "):
                reason = SkipReason.NEEDS_KEY
        if reason:
            return unavailable(reason, at, key)
        return ObjectReadFailed(
            f"{name} cannot be read: {code_of(error)} (HTTP status {status_of(error)})"
        )
    if isinstance(error, WrongBody):
        why = str(error)
    else:
        why = _CRT_MESSAGES.get(getattr(error, "name", ""), "")
        why = why or f"the server {reason_of(error, at.endpoint)}"
    return ObjectReadFailed(f"{name} cannot be read from {at.endpoint}: {why}")


def unavailable(reason: SkipReason, at: BucketAddress, key: bytes) -> ObjectUnavailable:
    """Return the error for an object that cannot be archived now."""
    return ObjectUnavailable(f"{at.of(key)} {_DESCRIPTIONS[reason]}", reason=reason)


def concerns_source(error: Exception, at: BucketAddress) -> bool:
    """Return whether no request can succeed: wrong credentials, bucket or region."""
    return _general_error(error, at) is not None


def _general_error(error: Exception, at: BucketAddress) -> CafError | None:  # noqa: PLR0911 - one for each kind
    if isinstance(error, NoCredentialsError):
        return SourceDenied(f"{at} needs credentials, and none are set", hint=at.credentials_hint)
    if isinstance(error, _NO_CREDENTIALS):
        return SourceDenied(
            f"the credentials for {at} cannot be used: {first_line(error)}",
            hint=at.credentials_hint,
        )
    if isinstance(error, ParamValidationError):
        return SettingsError(f"{at.setting('bucket')}: '{at.bucket}' is not a bucket name")
    if not isinstance(error, ClientError):
        return None
    code, details = code_of(error), error.response.get("Error", {})
    expected = _EXPECTED_REGION.search(str(details.get("Message", "")))
    region = _headers(error).get("x-amz-bucket-region") or details.get("Region")
    region = str(region or (expected and expected[1]) or "")
    region = region if _REGION.fullmatch(region) else ""
    if code == "RequestTimeTooSkewed":
        return SourceDenied(
            f"{at} refuses requests because this machine's clock is wrong",
            hint="correct this machine's clock",
        )
    if code in ("InvalidAccessKeyId", "InvalidClientTokenId"):
        return SourceDenied(
            f"{at} does not know the access key ({code})",
            hint=f"check {at.key_hint('ACCESS_KEY_ID')}",
        )
    if code == "SignatureDoesNotMatch":
        return SourceDenied(
            f"{at} refuses the signature ({code}): the secret key does not match the access key",
            hint=f"check {at.key_hint('SECRET_ACCESS_KEY')}; on some servers the cause is a wrong "
            f"{at.setting('region')}",
        )
    if code == "AuthorizationHeaderMalformed" and region:
        return _elsewhere(region, at)
    if code in _CREDENTIALS:
        return SourceDenied(f"{at} refuses the credentials ({code})", hint=at.credentials_hint)
    if code in ("NoSuchBucket", "InvalidBucketName"):
        return missing_bucket(at)
    if code in _REDIRECTS and (region or "location" not in _headers(error)):
        return _elsewhere(region, at)
    return None


def _elsewhere(region: str, at: BucketAddress) -> SourceError:
    where = f"region '{region}'" if region else "another region"
    value = f"'{region}'" if region else "the bucket's region"
    return SourceError(f"{at} is in {where}", hint=f"set {at.setting('region')} to {value}")


def _headers(error: ClientError) -> Mapping[str, str]:
    return error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})


def missing_bucket(at: BucketAddress) -> BucketMissing:
    """Return the error for a missing bucket."""
    return BucketMissing(
        f"there is no {at}",
        hint=f"check {at.setting('bucket')} and {at.setting('endpoint_url')}",
    )


_PAGE: Final = "it answers with a web page"
_TRUST: Final = "check the endpoint's certificate; AWS_CA_BUNDLE names a file of trusted ones"
