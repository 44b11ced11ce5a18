"""What S3's answers mean (404, 412, 503, …): one table from its codes to errors and skip reasons;
what is retried.

Source: "List of error codes" in the Amazon S3 API Reference; botocore's own list of transient
codes.
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
"""The wait before the n-th retry is random, up to the first doubled n times, at most this
(botocore's own limit).
"""

T = TypeVar("T")


_SAID_BY_CRT: Final = {
    # What S3 said is not in these errors, nor the status.
    "AWS_ERROR_S3_INTERNAL_ERROR": "the server has an error of its own (InternalError, or HTTP "
    "status 500, 502 or 504)",
    "AWS_ERROR_S3_SLOW_DOWN": "the server asks for fewer requests (SlowDown, or HTTP status 503)",
    "AWS_ERROR_S3_REQUEST_TIMEOUT": "the server did not get the request in time (RequestTimeout)",
    # What comes is not what was asked for.
    "AWS_ERROR_DEST_COPY_TOO_SMALL": "more bytes came than were asked for",
    "AWS_ERROR_S3_MISSING_ETAG": "the answer has no ETag",
    "AWS_ERROR_S3_MISSING_CONTENT_RANGE_HEADER": "the answer does not say which part of the object "
    "it is",
    "AWS_ERROR_S3_INVALID_CONTENT_RANGE_HEADER": "the answer does not say which part of the object "
    "it is",
}


class WrongBody(Exception):
    """A body of another length than was promised, or of another object. It is read again."""


class InvalidXml(Exception):
    """An answer with a status of success whose body is not valid S3 XML.

    The message says what is wrong with the body.

    Attributes: is_page: the server calls the body HTML. has_doctype: the body has a document type
        declaration, which S3 never sends. Entity bombs and XXE need one.
    """

    def __init__(self, wrong: str, *, is_page: bool, has_doctype: bool = False) -> None:
        super().__init__(wrong)
        self.is_page = is_page
        self.has_doctype = has_doctype


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """What errors say of where they happened: the source's name in the settings, for hints; the
    bucket; the server's URL.
    """

    source: str
    bucket: str
    endpoint: str

    def __str__(self) -> str:
        return f"bucket '{self.bucket}' at {self.endpoint}"

    def of(self, key: bytes) -> str:
        """Return how an object is named in messages."""
        return f"s3://{self.bucket}/{key.decode('utf-8', 'backslashreplace')}"

    def setting(self, name: str) -> str:
        """Return the name of a setting of this source, as in caf.toml."""
        return f"sources.{self.source or '<name>'}.{name}"

    @property
    def credentials_hint(self) -> str:
        """Where credentials come from."""
        keys = f"{self._variable}ACCESS_KEY_ID and {self._variable}SECRET_ACCESS_KEY"
        how = " (with 'env', since a shell's own names have no '-')" if "-" in self.source else ""
        return (
            f"set {keys}{how}, or those of AWS, or {self.setting('profile')}, or anonymous = "
            "true for a public bucket"
        )

    def key_hint(self, name: str) -> str:
        """Return where half a pair of keys comes from, e.g. `ACCESS_KEY_ID`."""
        return f"{self._variable}{name}, or where that is not set AWS_{name} or the profile's"

    @property
    def _variable(self) -> str:
        """The beginning of the names of this source's environment variables."""
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
"""Codes that no object of the source can be read under."""

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
    # The key is disabled, deleted or unknown: somebody has to bring it back. Where the key is there
    # and only the permission to use it is missing, S3 says AccessDenied.
    "KMS.DisabledException": SkipReason.NEEDS_KEY,
    "KMS.NotFoundException": SkipReason.NEEDS_KEY,
    "KMS.KMSInvalidStateException": SkipReason.NEEDS_KEY,
    "KMS.InvalidKeyUsageException": SkipReason.NEEDS_KEY,
    # Servers that give a status and no code.
    "412": SkipReason.CHANGED,
    "404": SkipReason.DELETED,
    "405": SkipReason.DELETED,
    "403": SkipReason.ACCESS_DENIED,
}

_WHY: Final[dict[SkipReason, str]] = {
    SkipReason.CHANGED: "has changed since it was listed",
    SkipReason.DELETED: "is gone since it was listed",
    SkipReason.COLD_STORAGE: "is in cold storage and has to be restored first",
    SkipReason.ACCESS_DENIED: "may not be read with these credentials",
    SkipReason.NEEDS_KEY: "is encrypted with a key that was not given or is not usable",
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
    """Return S3's code, or the status as text where the answer had none (that to a HEAD has no
    body).
    """
    return str(error.response.get("Error", {}).get("Code") or status_of(error))


def status_of(error: ClientError) -> int:
    """Return the HTTP status, 0 where there is none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)


def is_transient(error: BaseException) -> bool:
    """Tell whether the same request may succeed later without anybody changing anything."""
    if isinstance(error, ClientError):
        return code_of(error) in _TRANSIENT or status_of(error) in _TRANSIENT_STATUS
    if isinstance(error, InvalidXml):
        return not error.has_doctype  # else the body may have been cut off
    failed = isinstance(
        error, WrongBody | NoConnection | HTTPClientError | IncompleteReadError | AwsCrtError
    )
    return failed and not reason_of(error).lasts


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """How one source is asked.

    Attributes:
        at: where.
        attempts: of one request, the first included, where it fails transiently.
        waits: where it is said while there is no answer.
    """

    at: BucketAddress
    attempts: int
    waits: Waits

    def attempt(self, call: Callable[[], T]) -> T:
        """Return what `call` does as `retried` does, and say where an answer is waited for."""
        with self.waiting(UNANSWERED_SECONDS) as wait:
            answer = self.retried(call)
            wait.moved()  # other threads may wait by the same words, of which one is always there
            return answer

    def retried(self, call: Callable[[], T]) -> T:
        """Return what `call` does, trying it again while it fails transiently; its last error is
        raised.
        """
        try:
            return call()  # nearly always; tenacity costs as much CPU as a small GET
        except Exception as error:
            if not is_transient(error):
                raise
            failed = [error]

        def first_failed() -> T:
            if failed:
                raise failed.pop()
            return call()

        return Retrying(
            stop=stop_after_attempt(self.attempts),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_SECONDS, max=MAX_WAIT_SECONDS),
            retry=retry_if_exception(is_transient),
            reraise=True,
        )(first_failed)

    def waiting(self, grace: float) -> "AbstractContextManager[OpenWait]":
        """Say, after `grace` seconds, that an answer is waited for."""
        what, ends_by = _said_while_waiting(self.at, self.attempts)
        return self.waits.waiting(what, ends_by=ends_by, grace=grace)


@cache
def _said_while_waiting(at: BucketAddress, attempts: int) -> tuple[str, str]:
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
"""What the two functions below translate."""


def source_error(error: Exception, at: BucketAddress) -> CafError:  # noqa: PLR0911 - one for each kind
    """Return the user's error for a failure that concerns the whole source."""
    known = _known_source_error(error, at)
    if known:
        return known
    if isinstance(error, NoConnection | HTTPClientError | IncompleteReadError):
        reason = reason_of(error, at.endpoint)
        kind = SourceError if reason.lasts else SourceUnreachable
        return kind(
            f"the S3 endpoint {at.endpoint} {reason}",
            hint=hint_for(reason, at.setting("endpoint_url")) or _TRUST,
        )
    if isinstance(error, ClientError) and not is_transient(error):
        return _listing_refused(error, at)
    if (isinstance(error, ClientError) and code_of(error).isdigit() and _is_page(error)) or (
        isinstance(error, InvalidXml) and error.is_page
    ):
        return SourceUnreachable(
            f"what listens at {at.endpoint} is not S3, or is out of order: {_PAGE}", hint=_api(at)
        )
    if isinstance(error, InvalidXml):
        kind = ListingRefused if error.has_doctype else SourceUnreachable
        return kind(f"{at} answers with a body that is not valid S3 XML: {error}", hint=_api(at))
    if isinstance(error, ClientError | WrongBody):
        what = f"answers with {code_of(error)}" if isinstance(error, ClientError) else str(error)
        return SourceUnreachable(f"{at} {what}", hint="wait, and try again")
    if isinstance(error, ResponseParserError):
        return not_s3("it answers with something that is not S3's XML", at)
    return SourceError(f"{at} cannot be asked: {first_line(error)}")


def not_s3(found: str, at: BucketAddress) -> CafError:
    """Return the error for an endpoint that answers as no S3 API does."""
    if speaks_only_tls(at.endpoint):
        return SourceError(
            f"the S3 endpoint {at.endpoint} {Reason.ONLY_TLS}",
            hint=hint_for(Reason.ONLY_TLS, at.setting("endpoint_url")),
        )
    return ListingRefused(f"what listens at {at.endpoint} is not S3: {found}", hint=_api(at))


def _api(at: BucketAddress) -> str:
    return (
        f"{at.setting('endpoint_url')} must be the address of an S3 API: many servers have a "
        "web page at another port"
    )


def _is_page(error: ClientError) -> bool:
    return "html" in _headers(error).get("content-type", "")


def _listing_refused(error: ClientError, at: BucketAddress) -> CafError:
    status = status_of(error)
    if code_of(error).isdigit():  # an answer without an error code of S3, or to a HEAD
        if 300 <= status < 400 and (location := _headers(error).get("location")):
            return ListingRefused(
                f"{at} redirects to {location[:200]}",
                hint=f"set {at.setting('endpoint_url')} to where the S3 API is",
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
        f"{at} refuses to be listed: {code_of(error)} (HTTP status {status_of(error)})",
        hint=f"check {at.setting('bucket')}, {at.setting('endpoint_url')} and the credentials",
    )


def object_error(error: Exception, at: BucketAddress, key: bytes) -> CafError:
    """Return what a failure to read one object is to the user."""
    known = _known_source_error(error, at)
    if known:
        return known
    name = at.of(key)
    if isinstance(error, ClientError):
        if reason := _reason(error):
            return unavailable(reason, at, key)
        return ObjectReadFailed(
            f"{name} cannot be read: {code_of(error)} (HTTP status {status_of(error)})"
        )
    said = (
        _SAID_BY_CRT.get(getattr(error, "name", ""))
        or f"the server {reason_of(error, at.endpoint)}"
    )
    if isinstance(error, WrongBody):
        said = str(error)
    return ObjectReadFailed(f"{name} cannot be read from {at.endpoint}: {said}")


def unavailable(reason: SkipReason, at: BucketAddress, key: bytes) -> ObjectUnavailable:
    """Return the error for an object that cannot be archived now."""
    return ObjectUnavailable(f"{at.of(key)} {_WHY[reason]}", reason=reason)


def _reason(error: ClientError) -> SkipReason | None:
    reason = _REASONS.get(code_of(error)) or _REASONS.get(str(status_of(error)))
    if reason is None and code_of(error) == "InvalidRequest":
        # Of S3's many invalid requests, the one for SSE-C is told by its words only: "The object
        # was stored using a form of Server Side Encryption. The correct parameters must be provided
        # to retrieve the object."
        words = str(error.response.get("Error", {}).get("Message", "")).lower().replace("-", " ")
        return SkipReason.NEEDS_KEY if "server side encryption" in words else None
    return reason


def concerns_source(error: Exception, at: BucketAddress) -> bool:
    """Tell whether no request to this source can succeed: wrong credentials, no such bucket,
    another region.
    """
    return _known_source_error(error, at) is not None


def _known_source_error(error: Exception, at: BucketAddress) -> CafError | None:
    """Return the error where listing and reading fail alike."""
    if isinstance(error, NoCredentialsError):
        return SourceDenied(
            f"there are no usable credentials for {at}: none were found", hint=at.credentials_hint
        )
    if isinstance(error, _NO_CREDENTIALS):
        return SourceDenied(
            f"there are no usable credentials for {at}: {first_line(error)}",
            hint=at.credentials_hint,
        )
    if isinstance(error, ParamValidationError):
        return SettingsError(f"{at.setting('bucket')}: '{at.bucket}' is not the name of a bucket")
    return _known_code(error, at) if isinstance(error, ClientError) else None


def _known_code(error: ClientError, at: BucketAddress) -> CafError | None:  # noqa: PLR0911 - one for each
    code, region = code_of(error), _other_region(error)
    if code == "RequestTimeTooSkewed":
        return SourceDenied(
            f"{at} refuses requests, since this machine's clock is wrong",
            hint="set the machine's clock right",
        )
    if code in ("InvalidAccessKeyId", "InvalidClientTokenId"):
        return SourceDenied(
            f"{at} refuses the access key: it does not know it ({code})",
            hint=f"check {at.key_hint('ACCESS_KEY_ID')}",
        )
    if code == "SignatureDoesNotMatch":
        return SourceDenied(
            f"{at} refuses the signature ({code}): the secret key does not belong to the access "
            "key",
            hint=f"check {at.key_hint('SECRET_ACCESS_KEY')}; some servers say the same of a wrong "
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
    where, own = (
        (f"region '{region}'", f"'{region}'") if region else ("another region", "the bucket's own")
    )
    return SourceError(f"{at} is in {where}", hint=f"set {at.setting('region')} to {own}")


def _other_region(error: ClientError) -> str:
    """Return the region that an answer says the bucket is in, "" where it says none."""
    told = error.response.get("Error", {})
    expected = _EXPECTED_REGION.search(str(told.get("Message", "")))
    region = str(
        _headers(error).get("x-amz-bucket-region")
        or told.get("Region")
        or (expected and expected[1])
        or ""
    )
    return region if _REGION.fullmatch(region) else ""


def _headers(error: ClientError) -> Mapping[str, str]:
    return error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})


def missing_bucket(at: BucketAddress) -> BucketMissing:
    """Return the error of a bucket that is not there."""
    return BucketMissing(
        f"there is no {at}", hint=f"check {at.setting('bucket')} and {at.setting('endpoint_url')}"
    )


_PAGE: Final = "it answers with a web page"
_TRUST: Final = "check the endpoint's certificate; AWS_CA_BUNDLE names a file with those to trust"
