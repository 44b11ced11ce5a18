"""Entries of S3 listings, as XML."""

from xml.sax.saxutils import escape

TIME = "2026-11-01T12:30:15.000Z"


def entry(key: str, **changes: str | None) -> str:
    fields = {
        "Key": key,
        "LastModified": TIME,
        "ETag": '"e1"',
        "Size": "3",
        "StorageClass": "STANDARD",
    } | changes
    return "".join(
        f"<{name}>{escape(value)}</{name}>" for name, value in fields.items() if value is not None
    )


def version(key: str, version_id: str, latest: bool, tag: str = "Version") -> str:
    size = None if tag == "DeleteMarker" else "3"
    fields = entry(key, VersionId=version_id, IsLatest=str(latest).lower(), Size=size)
    return f"<{tag}>{fields}</{tag}>"
