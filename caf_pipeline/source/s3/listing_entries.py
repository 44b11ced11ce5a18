"""Reads the entries of a listing's page in boto3's place, which takes three to four times as long for the same.

boto3 reads all that is left of the page, and all that is no page.
Source: ListObjectsV2 and ListObjectVersions in the Amazon S3 API Reference; `BaseXMLResponseParser` and the event `before-parse`
of botocore 1.44.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

from botocore.utils import parse_timestamp

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_OPERATIONS: Final = ("ListObjectsV2", "ListObjectVersions")


def _moment(said: str) -> datetime:
    """Read a time as S3 writes it; botocore reads what other servers write, and says what is none."""
    try:
        moment = datetime.fromisoformat(said)
    except ValueError:
        return parse_timestamp(said)
    return moment if moment.tzinfo else parse_timestamp(said)


_Fields = Mapping[str, Callable[[str], object]]

_EITHER: Final[_Fields] = {"Key": str, "LastModified": _moment}
_OBJECT: Final[_Fields] = {
    **_EITHER,
    "ETag": str,
    "Size": int,
    "StorageClass": str,
    "ChecksumAlgorithm": list,
    "ChecksumType": str,
}
_VERSION: Final[_Fields] = {"VersionId": str, "IsLatest": "true".__eq__}

_KINDS: Final[Mapping[str, tuple[str, _Fields]]] = {
    "Contents": ("Contents", _OBJECT),
    "Version": ("Versions", {**_OBJECT, **_VERSION}),
    "DeleteMarker": ("DeleteMarkers", {**_EITHER, **_VERSION}),
}
"""An entry's element, what boto3 calls the list of them, and what is read of one: not who owns it, nor how a restore stands. Of
what is a list there may be several."""


def read_entries(client: "S3Client") -> None:
    """Let the client read pages by this; of an entry it gives the fields above and no others, each as boto3 does."""
    for operation in _OPERATIONS:
        # `*` is before `s3`, where botocore's own handler parses what is then left of the page, to look for an error.
        client.meta.events.register(f"before-parse.*.{operation}", _take_entries)


def _take_entries(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object) -> None:
    """Move the entries from the body to what boto3 adds to its answer; raises ValueError where a number or a time is none."""
    parser = ElementTree.XMLParser(encoding="utf-8")  # whatever the page says of itself, as botocore
    try:
        parser.feed(response_dict["body"])
        root = parser.close()
    except ElementTree.ParseError:
        return  # botocore meets it again, says so, and knows that another attempt may help
    lists: dict[str, list[dict[str, Any]]] = {}
    rest = []
    for element in root:
        if of_kind := _KINDS.get(_name(element.tag)):
            kind, fields = of_kind
            lists.setdefault(kind, []).append(_entry(element, fields))
        else:
            rest.append(element)
    if lists:
        root[:] = rest
        response_dict["body"] = ElementTree.tostring(root, encoding="utf-8")
        customized_response_dict.update(lists)


def _entry(element: ElementTree.Element, fields: _Fields) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for child in element:
        name, text = _name(child.tag), child.text or ""
        if (read := fields.get(name)) is list:
            entry.setdefault(name, []).append(text)
        elif read:
            entry[name] = read(text)
    return entry


@lru_cache
def _name(tag: str) -> str:
    """Return an element's name without its namespace, which some servers leave out."""
    return tag.rpartition("}")[2]
