"""A scripted S3 server with listings that moto cannot give.

Keys have any bytes and any order, and the server may ignore the start of a listing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from caf_pipeline.source.s3.source import S3Source
from caf_pipeline_tests.support.s3_server import (
    Bucket,
    Request,
    ScriptedAnswer,
    ScriptedS3,
    client_for,
)

_ENTRY = (
    "<{tag}><Key>{key}</Key><LastModified>2026-11-01T12:30:15.000Z</LastModified>"
    "<ETag>&quot;e&quot;</ETag>{more}</{tag}>"
)

Entry = tuple[bytes, str, str, bool]
"""Key, element, version id, and whether it is the latest version."""


@dataclass
class ListedKeys:
    """The keys of a bucket, and how they are listed.

    Attributes:
        order: the sort key.
        starts: the server supports StartAfter and KeyMarker.
        versioned: each key has three versions, the latest first, and precedes a deleted key.
        history: the version ids of each key instead, the latest first; "d…" is a delete marker.
        repeats: a page begins with the last version of the page before, as versitygw's do.
        on_page: called with a page's number before it is answered.
        echo: encodes the start of a listing, which its first answer repeats.
    """

    keys: Iterable[bytes]
    order: Callable[[bytes], object] = bytes
    starts: bool = True
    versioned: bool = False
    history: Mapping[bytes, Sequence[str]] | None = None
    repeats: bool = False
    on_page: Callable[[int], None] = lambda number: None
    echo: Callable[[str], str] = quote
    pages: list[Request] = field(default_factory=list)
    _sorted: list[Entry] = field(default_factory=list)
    _sorted_count: int = -1

    def __call__(self, request: Request) -> ScriptedAnswer:
        if "versioning" in request.query:
            status = "<Status>Enabled</Status>" if self.by_version else ""
            return _xml(f"<VersioningConfiguration>{status}</VersioningConfiguration>")
        self.pages.append(request)
        self.on_page(len(self.pages))
        entries = self._entries()
        begin = self._begin(request, entries)
        end = begin + int(request.query["max-keys"])
        body = "".join(_entry(*entry) for entry in entries[begin:end])
        for name in {"start-after", "key-marker"} & request.query.keys():
            body += f"<{name}>{self.echo(request.query[name])}</{name}>"
        more = ""
        if end < len(entries):
            more = f"<NextContinuationToken>{end}</NextContinuationToken>"
            if self.by_version:
                key, _, version, _ = entries[end - 1]
                more = (
                    f"<NextKeyMarker>{quote(key)}</NextKeyMarker>"
                    f"<NextVersionIdMarker>{version}</NextVersionIdMarker>"
                )
        truncated = str(end < len(entries)).lower()
        return _xml(
            f"<R><EncodingType>url</EncodingType><IsTruncated>{truncated}</IsTruncated>{more}{body}</R>"
        )

    @property
    def by_version(self) -> bool:
        """True if the bucket keeps versions."""
        return self.versioned or self.history is not None

    def _entries(self) -> list[Entry]:
        """Return all entries in order; sorts them again only if keys were added."""
        keys = list(self.keys)
        if len(keys) != self._sorted_count:
            unversioned = [(key, "Contents", "", True) for key in sorted(keys, key=self.order)]
            self._sorted, self._sorted_count = (
                self._versions() if self.by_version else unversioned,
                len(keys),
            )
        return self._sorted

    def _versions(self) -> list[Entry]:
        history = self.history
        if history is None:
            history = {key: ("3", "2", "1") for key in self.keys} | {
                key + b"-": ("d",) for key in self.keys
            }
        return [
            (key, "DeleteMarker" if version.startswith("d") else "Version", version, number == 0)
            for key in sorted(history, key=self.order)
            for number, version in enumerate(history[key])
        ]

    def _begin(self, request: Request, entries: list[Entry]) -> int:
        if token := request.query.get("continuation-token"):
            return int(token)
        marker = request.query.get("key-marker" if self.by_version else "start-after", "")
        version = request.query.get("version-id-marker")
        if version:
            at = next(
                at
                for at, entry in enumerate(entries)
                if (entry[0], entry[2]) == (marker.encode(), version)
            )
            return at if self.repeats else at + 1
        if not marker or not self.starts:
            return 0
        return sum(self.order(entry[0]) <= self.order(marker.encode()) for entry in entries)

    def serve(self, server: ScriptedS3, page_keys: int) -> S3Source:
        """Make a scripted server list the keys; return its source."""
        server.answer = self
        return listing_source(server.endpoint, page_keys)


def listing_source(endpoint: str, page_keys: int) -> S3Source:
    """Return a scripted server as a source."""
    return Bucket(endpoint, "bucket-of-script", client_for(endpoint)).source(page_keys=page_keys)


def _entry(key: bytes, tag: str, version: str, is_latest: bool) -> str:
    latest = str(is_latest).lower()
    more = "" if tag == "DeleteMarker" else "<Size>3</Size>"
    if version:
        more += f"<VersionId>{version}</VersionId><IsLatest>{latest}</IsLatest>"
    return _ENTRY.format(tag=tag, key=quote(key), more=more)


def _xml(body: str) -> ScriptedAnswer:
    return ScriptedAnswer(200, body.encode(), {"Content-Type": "application/xml"})


def by_component(key: bytes) -> object:
    """Sort keys like a server that walks folders."""
    return key.split(b"/")


def by_utf16(key: bytes) -> object:
    """Sort keys like a server that stores them as UTF-16."""
    return key.decode("utf-8", "surrogateescape").encode("utf-16-be", "surrogatepass")
