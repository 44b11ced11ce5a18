"""Reads the entries of a listing's page in boto3's place, which takes three to four times as long
for the same.

boto3 reads all that is left of the page, and all that is no page. Source: ListObjectsV2 and
ListObjectVersions in the Amazon S3 API Reference; `BaseXMLResponseParser` and the event
`before-parse` of botocore 1.44.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final
from xml.etree import ElementTree

from botocore.utils import parse_timestamp

from caf_pipeline.source.s3.client_type import S3Client
from caf_pipeline.source.s3.errors import InvalidXml

_OPERATIONS: Final = ("ListObjectsV2", "ListObjectVersions")


def _moment(said: str) -> datetime:
    """Read a time as S3 writes it; botocore reads what other servers write, and says what is
    none.
    """
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
"""An entry's element, what boto3 calls the list of them, and what is read of one: not who owns it,
nor how a restore stands. Of what is a list there may be several.
"""


def read_entries(client: S3Client) -> None:
    """Let the client read pages by this; of an entry it gives the fields above and no others, each
    as boto3 does.

    An answer to these operations, or to GetBucketVersioning, that is not valid S3 XML raises
    InvalidXml.
    """
    # `*` is before `s3`, where botocore's own handler parses what is then left of the page, to look
    # for an error.
    for operation in _OPERATIONS:
        client.meta.events.register(f"before-parse.*.{operation}", _take_entries)
    client.meta.events.register("before-parse.*.GetBucketVersioning", _refuse_invalid)


def _take_entries(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    """Move the entries from the body to what boto3 adds to its answer; raises ValueError where a
    number or a time is none.
    """
    root = _read_xml(response_dict)
    if root is None:
        return
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


class _Doctype(Exception):
    """A document type declaration."""


class _WithoutDoctype(ElementTree.TreeBuilder):
    """Raises at a document type declaration, before any entity of it is used."""

    def doctype(self, name: str, public_id: str | None, system_id: str | None) -> None:
        raise _Doctype


def _refuse_invalid(response_dict: dict[str, Any], **_: object) -> None:
    _read_xml(response_dict)


def _read_xml(response_dict: Mapping[str, Any]) -> ElementTree.Element | None:
    """Return the root of an answer's body; None if the answer has another status than 200, or no
    body.

    Botocore would report a body of status 200 that it cannot parse as an answer of status 500.

    Raises:
        InvalidXml: the body has a document type declaration, or is not well-formed.
    """
    body = response_dict["body"]
    if response_dict["status_code"] != HTTPStatus.OK or not body:
        return None
    is_page = "html" in response_dict["headers"].get("content-type", "")
    # A TreeBuilder of our own is slow, and no listing of S3 has these bytes.
    target = _WithoutDoctype() if b"<!DOCTYPE" in body else None
    parser = ElementTree.XMLParser(
        target=target, encoding="utf-8"
    )  # whatever the page says of itself, as botocore
    try:
        parser.feed(body)
        root: ElementTree.Element = parser.close()
    except _Doctype as error:
        raise InvalidXml(
            "it has a document type declaration", is_page=is_page, has_doctype=True
        ) from error
    except ElementTree.ParseError as error:
        raise InvalidXml(str(error), is_page=is_page) from error
    return root


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
