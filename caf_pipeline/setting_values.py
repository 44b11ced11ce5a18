"""Validators of setting values. Every message describes a valid value.

They check the text only. A missing bucket, server or folder is detected on use.
"""

import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, SecretStr
from pydantic_core import PydanticKnownError

from caf_pipeline.errors import KeyRefused

# A chunk's id has at most 50 characters: <name>-<12 hex>-<5 digits>.
MAX_SOURCE_NAME: Final = 30
MAX_KEY_BYTES: Final = 1024  # of an object in S3
LEAST_WORDS: Final = 12  # of a mnemonic

MAX_PATTERNS_SIZE: Final = 600_000
"""Limit for the patterns of one setting, which become one regular expression.

DuckDB 2.0 gives RE2 8 MiB for it: 699,050 instructions, measured by trial. A byte takes 1, `?` 10,
`*` 11, and each further pattern 1. `_WILD_SIZE` rounds up.
"""

_WILD_SIZE: Final = 12

_SOURCE_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_BUCKET: Final = re.compile(r"[A-Za-z0-9._-]{1,255}|arn:[A-Za-z0-9:/_-]+")
"""The same rule as in S3's client.

Old buckets and other servers have names that AWS no longer allows. An ARN names an access point.
"""

_REGION: Final = re.compile(r"(?![0-9]+$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
_HOST: Final = re.compile(r"(?:(?!-)[A-Za-z0-9_-]{1,63}(?<!-)\.)*(?!-)[A-Za-z0-9_-]{1,63}(?<!-)\.?")
_IPV6: Final = re.compile(r"[0-9A-Fa-f:.]+")
_CHAIN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,49}")  # Tendermint allows 50 characters

_ENCODED: Final = r"%(?!00)[0-9A-Fa-f]{2}"
_PLAIN: Final = rf"(?:[^\s\x00-\x20\x7f\ud800-\udfff@/:?#&\[\]\\%]|{_ENCODED})"
_DATABASE_HOST: Final = rf"(?:(?:[\w.-]|{_ENCODED})*|\[[0-9A-Fa-f:.]+(?:%25[\w.-]+)?\])(?::[0-9]+)?"
_DATABASE_URL: Final = re.compile(
    r"postgres(?:ql)?(?:\+[a-z0-9]+)?://"
    rf"(?:{_PLAIN}*(?::(?:{_PLAIN}|[:&])*)?@)?"
    rf"(?P<hosts>{_DATABASE_HOST}(?:,{_DATABASE_HOST})*)"
    rf"(?:/(?:{_PLAIN}|:)*)?"
    rf"(?:\?(?P<parameters>[a-z_]+=(?:(?!=)(?:{_PLAIN}|[/:,]))*"
    rf"(?:&[a-z_]+=(?:(?!=)(?:{_PLAIN}|[/:,]))*)*)?)?"
)
"""The address of a Postgres database, stricter than libpq.

User, password and host can be separated in one way only.
"""

ENCODE_IN_URL: Final = (
    "percent-encode spaces and '@', '/', '?', '#', '%', '&', '[', ']' and '\\' "
    "in user and password, and ':' in the user"
)

_STORAGE_CLASS: Final = re.compile(r"[A-Z][A-Z0-9_]*")
_WORKER_KEY: Final = re.compile(r"[0-9A-Fa-f]{64}")
_MAIL_ADDRESS: Final = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+")

# Dagster's rule, which it checks when the assets are built. A test compares the two.
_OWNER: Final = re.compile(
    r"team:.+|\b[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Z|a-z]{2,7}\b", re.DOTALL
)


def is_source_name(name: str) -> bool:
    """Return whether a source may have this name."""
    return len(name) <= MAX_SOURCE_NAME and _SOURCE_NAME.fullmatch(name) is not None


def _source_name(name: str) -> str:
    if not is_source_name(name):
        raise ValueError(
            f"must be a source's name: at most {MAX_SOURCE_NAME} of a-z, 0-9 and '-', no '-' at "
            "either end"
        )
    return name


def _bucket(name: str) -> str:
    if "/" in name and not name.startswith("arn:"):
        raise ValueError("must be a bucket's name without a prefix; set 'prefix' instead")
    if not _BUCKET.fullmatch(name):
        raise ValueError("must be a bucket's name: 1 to 255 letters, digits, '.', '-' and '_'")
    return name


def names_access_point(bucket: str) -> bool:
    """Return whether a source's `bucket` is the ARN or alias of an access point.

    S3's reports and events name the bucket instead.
    """
    return bucket.startswith("arn:") or bucket.endswith(("-s3alias", "--ol-s3"))


def _prefix(text: str) -> str:
    if "\0" in text or len(text.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise ValueError(
            f"must be the beginning of a key: at most {MAX_KEY_BYTES:,} bytes without NUL"
        )
    return text


def _pattern(text: str) -> str:
    if not 0 < len(text) <= MAX_KEY_BYTES:
        raise ValueError(f"must have 1 to {MAX_KEY_BYTES:,} characters")
    if "[" in text:  # a set of characters in other programs, and a plain character in some
        raise ValueError("must have '?' in place of '[': only '*' and '?' stand for others")
    return text


def _storage_class(name: str) -> str:
    if not _STORAGE_CLASS.fullmatch(name):
        raise ValueError("must be a storage class as listings name it: STANDARD, GLACIER_IR")
    return name


def _patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    wild = sum(pattern.count("*") + pattern.count("?") for pattern in patterns)
    size = sum(len(pattern.encode()) + 1 for pattern in patterns) + wild * (_WILD_SIZE - 1)
    if size > MAX_PATTERNS_SIZE:
        raise ValueError(
            f"must be shorter: {len(patterns):,} patterns have {size:,} bytes ('*' and '?' count "
            f"as {_WILD_SIZE}), and the limit is {MAX_PATTERNS_SIZE:,}"
        )
    return patterns


def _report_folder(text: str) -> str:
    if not text:
        return text
    bucket, _, folder = text.removeprefix("s3://").partition("/")
    segments = folder.removesuffix("/").split("/")
    if (
        not text.startswith("s3://")
        or not _BUCKET.fullmatch(bucket)
        or len(segments) < 2
        or not all(segments[-2:])
    ):
        raise ValueError(
            "must be the folder of S3 Inventory's reports: "
            "s3://DEST-BUCKET/PREFIX/SOURCE-BUCKET/CONFIG-ID/"
        )
    return text if text.endswith("/") else f"{text}/"


def _server(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    if "@" in text.partition("://")[2].partition("/")[0]:
        raise ValueError("must not hold a user or a password")
    if not text.isascii() or not text.isprintable() or set(" ?#") & set(text):
        raise ValueError(
            "must be an ASCII URL such as https://host:9000, without '?', '#' and spaces"
        )
    try:
        host, port = urlsplit(text).hostname or "", urlsplit(text).port
    except ValueError:
        host, port = "", 0
    if port == 0 or not (_HOST.fullmatch(host) or (":" in host and _IPV6.fullmatch(host))):
        raise ValueError("must be a URL such as https://host:9000, with a valid host and port")
    return text


def _endpoint(text: str) -> str:
    if text and "_" in (urlsplit(_server(text)).hostname or ""):
        raise ValueError("must have a host without '_', which S3's client refuses")
    return text


def _queue(text: str) -> str:
    if text and len([part for part in urlsplit(_server(text)).path.split("/") if part]) < 2:
        raise ValueError(
            "must be a queue's URL such as "
            "https://sqs.eu-central-1.amazonaws.com/111122223333/photos"
        )
    return text


def _region(name: str) -> str:
    if name and not _REGION.fullmatch(name):
        raise ValueError("must be a region's name such as eu-central-1: letters, digits and '-'")
    return name


def _owner(name: str) -> str:
    if not _OWNER.fullmatch(name):
        raise ValueError("must be team:NAME or an e-mail address, as the Dagster UI shows it")
    return name


def _chain_id(name: str) -> str:
    if not _CHAIN_ID.fullmatch(name):
        raise ValueError(
            "must be a chain's id such as jackal-1: 1 to 50 letters, digits, '.', '-' and '_'"
        )
    return name


def _proof_type(number: int) -> int:
    if number not in (0, 3):
        raise ValueError("must be a proof type, 0 or 3")
    return number


def _key(secret: SecretStr | None) -> SecretStr | None:
    text = secret.get_secret_value() if secret else ""
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("must be printable ASCII without a space or a line break")
    return secret if text else None


def is_database_url(text: str) -> bool:
    """Return whether the text is a Postgres address with unambiguous user, password and host.

    Otherwise a message could show part of the password as the host or database.
    """
    match = _DATABASE_URL.fullmatch(text)
    if not match:
        return False
    ports = re.findall(r":([0-9]+)(?:,|$)", match["hosts"])
    return all(len(port) <= 5 and 0 < int(port) < 1 << 16 for port in ports)


def _database_url(secret: SecretStr | None) -> SecretStr | None:
    text = secret.get_secret_value() if secret else ""
    if text and not is_database_url(text):
        raise ValueError(f"must be postgresql://user:password@host:port/database; {ENCODE_IN_URL}")
    return secret


def _webhook(secret: SecretStr | None) -> SecretStr | None:
    text = secret.get_secret_value() if secret else ""
    try:
        host = urlsplit(text).hostname or ""
    except ValueError:
        host = ""
    if text and (
        not text.startswith(("http://", "https://"))
        or not host
        or not text.isascii()
        or not text.isprintable()
    ):
        raise ValueError("must be a URL such as https://host/path")
    return secret if text else None


def _mail_address(text: str) -> str:
    if not _MAIL_ADDRESS.fullmatch(text):
        raise ValueError("must be an e-mail address such as ops@example.org")
    return text


def _recipient(text: str) -> str:
    from caf_pipeline.formats import age  # noqa: PLC0415  0.07 s, and many commands have no keys

    try:
        age.parse_recipient(text)
    except KeyRefused as error:
        raise ValueError(f"must be a recipient, 'age1pq1…' or 'age1…': {error}") from None
    return text


def _recipients(texts: tuple[str, ...]) -> tuple[str, ...]:
    if len({text.startswith("age1pq1") for text in texts}) > 1:
        raise ValueError(
            "must not mix hybrid and classic recipients: a quantum computer that breaks the "
            "classic key would read the chunk"
        )
    return texts


def _identity(secret: SecretStr | None) -> SecretStr | None:
    return secret if secret and secret.get_secret_value().strip() else None


def _identity_file(value: object) -> object:
    if isinstance(value, str) and value.strip().upper().startswith("AGE-SECRET-KEY-"):
        raise ValueError("must be the path of a file, not the identity")
    return _path(value)


def _command(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError:
        raise ValueError("must be a command whose quotes are closed") from None
    return text.strip()


def _worker_key(secret: SecretStr | None) -> SecretStr | None:
    text = secret.get_secret_value() if secret else ""
    if text and not _WORKER_KEY.fullmatch(text):
        raise ValueError("must be 64 hex digits, as 'caf keys worker' prints them")
    return secret if text else None


def _path(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value.strip() or "\0" in value:
        raise ValueError("must be a path that is not empty")
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        raise ValueError("must be a path; no user has the home folder that '~' names")
    return expanded


def _mnemonic_file(value: object) -> object:
    if isinstance(value, str) and len(value.split()) >= LEAST_WORDS:
        raise ValueError("must be the path of a file, not the wallet's words")
    return _path(value)


def _switch(value: object) -> object:
    """Variables have text; "yes" and "1" are typing errors in a switch that pays."""
    is_text = isinstance(value, str) and value.lower() in ("true", "false")
    if not (isinstance(value, bool) or is_text):
        raise PydanticKnownError("bool_type")
    return value


def _no_truth_value(value: object) -> object:
    """Python treats true and false as 1 and 0."""
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_DURATION: Final = re.compile(r"([0-9]{1,12})([smhd]?)")
_LONGEST_SECONDS: Final = 3660 * 24 * 3600  # ten years


def _duration(value: object) -> object:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    seconds = int(match[1]) * _UNIT_SECONDS[match[2] or "s"] if match else value
    if type(seconds) is not int or not 0 <= seconds <= _LONGEST_SECONDS:
        raise ValueError("must be a time such as 3600, 90m, 12h or 7d, at most 3660d")
    return seconds


SourceName = Annotated[str, AfterValidator(_source_name)]
BucketName = Annotated[str, AfterValidator(_bucket)]
KeyPrefix = Annotated[str, AfterValidator(_prefix)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Patterns = Annotated[tuple[Pattern, ...], AfterValidator(_patterns)]
StorageClass = Annotated[str, AfterValidator(_storage_class)]
ReportFolder = Annotated[str, AfterValidator(_report_folder)]
WebhookUrl = Annotated[SecretStr | None, AfterValidator(_webhook)]
MailAddress = Annotated[str, AfterValidator(_mail_address)]
QueueUrl = Annotated[str, AfterValidator(_queue)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
RegionName = Annotated[str, AfterValidator(_region)]
OwnerName = Annotated[str, AfterValidator(_owner)]
Lcd = Annotated[str, AfterValidator(_server)]
ChainId = Annotated[str, AfterValidator(_chain_id)]
Key = Annotated[SecretStr | None, AfterValidator(_key)]
DatabaseUrl = Annotated[SecretStr | None, AfterValidator(_database_url)]
Recipient = Annotated[str, AfterValidator(_recipient)]
Recipients = Annotated[tuple[Recipient, ...], AfterValidator(_recipients)]
IdentityText = Annotated[SecretStr | None, AfterValidator(_identity)]
IdentityFile = Annotated[Path, BeforeValidator(_identity_file)]
Command = Annotated[str, AfterValidator(_command)]
WorkerKey = Annotated[SecretStr | None, AfterValidator(_worker_key)]
FilePath = Annotated[Path, BeforeValidator(_path)]
MnemonicFile = Annotated[Path, BeforeValidator(_mnemonic_file)]
Switch = Annotated[bool, BeforeValidator(_switch)]
Whole = Annotated[int, BeforeValidator(_no_truth_value)]
Number = Annotated[float, BeforeValidator(_no_truth_value), Field(allow_inf_nan=False)]
Size = Annotated[ByteSize, BeforeValidator(_no_truth_value)]
Duration = Annotated[int, BeforeValidator(_duration)]  # seconds
# A Literal would refuse the text "3" of a variable.
ProofType = Annotated[int, BeforeValidator(_no_truth_value), AfterValidator(_proof_type)]
