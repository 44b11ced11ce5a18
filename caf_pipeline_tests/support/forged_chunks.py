"""Handmade chunks: correct ones, and forgeries that differ as a test requires."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caf_pipeline.caf.index import IndexBuilder
from caf_pipeline.caf.merkle import merkle_root
from caf_pipeline.inventory.manifest import (
    HEAD_MEMBER,
    MANIFEST_MEMBER,
    ChunkIdentity,
    ManifestWriter,
    head_bytes,
)
from caf_pipeline.records import PostedFile, PostRecord
from caf_pipeline.store.protocol import ChunkToStore, post_mac
from caf_pipeline_tests.support.memory_log import MemoryLog
from caf_pipeline_tests.support.plans import MOMENT

PLAN = "0a0b0c0d"


@dataclass
class Forgery:
    """The content of a handmade chunk.

    `bodies` are in the order of keys. `described` are the manifest's false values.
    """

    archive_id: str
    bodies: Mapping[str, bytes] = field(default_factory=lambda: {"a": b"one", "b": b"two"})
    source: str = "src"
    plan: str = PLAN
    number: int = 1
    head: bytes | None = None
    described: Mapping[str, Any] = field(default_factory=dict)
    skipped: Sequence[Mapping[str, Any]] = ()
    change_row: Callable[[dict[str, Any]], None] = lambda row: None
    change_manifest: Callable[[Path], None] = lambda path: None
    change_index: Callable[[bytes], bytes] = lambda index: index
    extra_member: bool = False
    footer: bytes | None = None

    @property
    def name(self) -> str:
        return f"{self.source}-{self.plan}-{self.number:05d}"

    def identity(self, **changes: Any) -> ChunkIdentity:
        fields = {
            "archive_id": self.archive_id,
            "source": self.source,
            "chunk": self.name,
            "plan": self.plan,
        }
        return ChunkIdentity(**{**fields, "snapshot": "snap", "inventory_time": MOMENT} | changes)

    def write(self, path: Path) -> Path:
        """Write the chunk and return its path."""
        head = self.head if self.head is not None else head_bytes(self.identity())
        index, content, rows = IndexBuilder(), bytearray(head), []
        index.add(HEAD_MEMBER, 0, len(head))
        for key, body in self.bodies.items():
            start, end = len(content), len(content) + len(body)
            content += body
            index.add(key, start, end)
            rows.append(a_row(key, body, start))
        spool = path.with_suffix(".manifest")
        with ManifestWriter(spool, self.identity(**self.described)) as manifest:
            for row in [*rows, *self.skipped]:
                changed = dict(row)
                self.change_row(changed)
                manifest.add(changed)
        self.change_manifest(spool)
        if self.extra_member:
            index.add("stowaway", len(content), len(content))
        start = len(content)
        content += spool.read_bytes()
        index.add(MANIFEST_MEMBER, start, len(content))
        written = self.change_index(b"".join(index.iter_index()))
        footer = self.footer if self.footer is not None else len(written).to_bytes(4, "little")
        path.write_bytes(bytes(content) + written + footer)
        return path


def a_row(key: str, body: bytes, start: int, **more: Any) -> dict[str, Any]:
    return {
        "member": key,
        "key": key,
        "version_id": None,
        "etag": "e",
        "size_bytes": len(body),
        "start_byte": start,
        "end_byte": start + len(body),
        "sha256": hashlib.sha256(body).digest(),
        "last_modified": MOMENT,
        "storage_class": "STANDARD",
    } | more


def a_skip(key: str, reason: str = "cold_storage", **more: Any) -> dict[str, Any]:
    row = a_row(key, b"", 0, member=None, start_byte=None, end_byte=None, sha256=None)
    return row | {"skip_reason": reason, "skip_detail": "as S3 said", "size_bytes": 7} | more


def accepts(posts: Sequence[PostedFile]) -> None:
    """Accept all posts at a rebuild's question."""


def put(
    store: Any,
    path: Path,
    archive_id: str,
    *,
    upload: bool = True,
    header_sha256: bytes | None = None,
    key: bytes | None = None,
) -> PostRecord:
    """Post a file under an archive, with a MAC if there is a key; upload it to all providers."""
    facts: dict[str, Any] = {
        "archive_id": archive_id,
        "stored_size_bytes": path.stat().st_size,
        "proof_type": store.proof_type,
        "merkle_root": merkle_root(path, store.proof_type),
        "header_sha256": header_sha256,
    }
    mac = post_mac(key, **facts) if key else None
    posting = store.post(ChunkToStore("by-hand", **facts, mac=mac), MemoryLog())
    if upload:
        store.put(posting, path, lambda _: None)
    return posting
