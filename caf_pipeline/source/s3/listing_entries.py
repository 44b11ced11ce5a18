"""Parses the entries of a listing's page, which takes boto3 three to four times as long.

Source: ListObjectsV2 and ListObjectVersions in the Amazon S3 API Reference; `BaseXMLResponseParser`
and the event `before-parse` of botocore 1.44.
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


def _timestamp(text: str) -> datetime:
    try:
        timestamp = datetime.fromisoformat(text)
    except ValueError:
        return parse_timestamp(text)
    return timestamp if timestamp.tzinfo else parse_timestamp(text)


_Fields = Mapping[str, Callable[[str], object]]

_COMMON: Final[_Fields] = {"Key": str, "LastModified": _timestamp}
_OBJECT: Final[_Fields] = {
    **_COMMON,
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
    "DeleteMarker": ("DeleteMarkers", {**_COMMON, **_VERSION}),
}
"""By element: boto3's name of the list, and the parsed fields. A `list` may repeat."""


def read_entries(client: S3Client) -> None:
    """Make the client parse entries with this module.

    Invalid XML in an answer to a listing or to GetBucketVersioning raises InvalidXml.
    """
    # Handlers of `*` run before those of `s3`, where botocore parses the rest of the page for an
    # error.
    for operation in _OPERATIONS:
        client.meta.events.register(f"before-parse.*.{operation}", _take_entries)
    client.meta.events.register("before-parse.*.GetBucketVersioning", _require_xml)


def _take_entries(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    root = _read_xml(response_dict)
    if root is None:
        return
    lists: dict[str, list[dict[str, Any]]] = {}
    rest = []
    for element in root:
        if (kind := _KINDS.get(_name(element.tag))) is None:
            rest.append(element)
            continue
        list_name, fields = kind
        entry: dict[str, Any] = {}
        for child in element:
            name, text = _name(child.tag), child.text or ""
            if (read := fields.get(name)) is list:
                entry.setdefault(name, []).append(text)
            elif read:
                entry[name] = read(text)
        lists.setdefault(list_name, []).append(entry)
    if lists:
        root[:] = rest
        response_dict["body"] = ElementTree.tostring(root, encoding="utf-8")
        customized_response_dict.update(lists)


class _Doctype(Exception): ...


class _WithoutDoctype(ElementTree.TreeBuilder):
    def doctype(self, name: str, public_id: str | None, system_id: str | None) -> None:
        raise _Doctype


def _require_xml(response_dict: dict[str, Any], **_: object) -> None:
    _read_xml(response_dict)


def _read_xml(response_dict: Mapping[str, Any]) -> ElementTree.Element | None:
    """botocore would report an unparsable body of status 200 as status 500."""
    body = response_dict["body"]
    if response_dict["status_code"] != HTTPStatus.OK or not body:
        return None
    is_page = "html" in response_dict["headers"].get("content-type", "")
    # A custom TreeBuilder is slow, and no listing of S3 has these bytes.
    target = _WithoutDoctype() if b"<!DOCTYPE" in body else None
    # Like botocore, ignores the encoding that the page declares.
    parser = ElementTree.XMLParser(target=target, encoding="utf-8")
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


@lru_cache
def _name(tag: str) -> str:
    """Some servers omit the namespace."""
    return tag.rpartition("}")[2]
