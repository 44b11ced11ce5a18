"""Finds, downloads and verifies S3 Inventory reports of a source.

A report is a folder named after its time, with a manifest that names files elsewhere. S3 writes the
manifest's checksum last; without it, a report is incomplete. Source: "Locating your inventory list"
in the Amazon S3 User Guide.
"""

import hashlib
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

from botocore.exceptions import ClientError

from caf_pipeline.errors import (
    BucketMissing,
    CafError,
    ReportRefused,
    SettingsError,
    SourceDenied,
    UsageError,
)
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA
from caf_pipeline.source.protocol import InventoryReport, ReportCounts
from caf_pipeline.source.s3.client_type import S3Client
from caf_pipeline.source.s3.errors import (
    REQUEST_ERRORS,
    BucketAddress,
    RequestPolicy,
    code_of,
    is_transient,
    source_error,
)
from caf_pipeline.source.s3.listing import Listing
from caf_pipeline.source.s3.report_manifest import (
    OTHER_REPORT_HINT,
    Manifest,
    ReportFile,
    read_manifest,
)
from caf_pipeline.source.s3.report_rows import ReportRows
from caf_pipeline.system.parquet import translate_errors, write_whole

FILES_AT_ONCE: Final = 4
"""Each takes 150 to 250 MiB of memory, measured with 10^6 rows in each format."""

MAX_MANIFEST_BYTES: Final = 64 << 20
"""Some 180 bytes a file. The report of a bucket with 10^8 objects had 516 files."""

CHUNK_BYTES: Final = 1 << 20  # one read of a file's body

MAX_FOLDER_PAGES: Final = 10
"""Ten years of daily reports fill seven."""

T = TypeVar("T")

_DATED: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\dZ")
_DAY_FORM: Final = "0000-00-00"
_NAME_FORM: Final = f"{_DAY_FORM}T00-00Z"
_COMPLETE: Final = frozenset({"manifest.json", "manifest.checksum"})
_MISSING: Final = frozenset({"NoSuchKey", "404"})
_IN_COLD_STORAGE: Final = "InvalidObjectState"
_KMS_PREFIX: Final = "KMS."


class _Stopped(Exception): ...


@dataclass(frozen=True)
class Reports:
    """The reports in a folder, `s3://…/` or "", read with the source's credentials."""

    client: S3Client
    policy: RequestPolicy
    listing: Listing
    folder: str
    extra: Mapping[str, Any]
    needs_storage_class: bool

    @property
    def source(self) -> BucketAddress:
        return self.policy.at

    @property
    def bucket(self) -> str:
        return self.folder.removeprefix("s3://").partition("/")[0]

    @property
    def prefix(self) -> str:
        return self.folder.removeprefix("s3://").partition("/")[2]

    def open(self, name: str) -> InventoryReport:
        if not self.folder:
            raise SettingsError(
                f"source '{self.source.source}' has no inventory reports: "
                f"{self.source.setting('inventory')} is not set",
                hint="'caf help docs/how-to/inventory-reports.md' describes how to set it up",
            )
        if name and not (
            len(name) >= len(_DAY_FORM) and _DATED.fullmatch(name + _NAME_FORM[len(name) :])
        ):
            raise UsageError(
                f"{name!r} is neither the day of an inventory report nor the name of its folder",
                hint="give a day as YYYY-MM-DD, or a folder's name such as 2026-11-21T01-00Z",
            )
        self._require_whole_source()
        pages = self.client.get_paginator("list_objects_v2")

        def list_folders() -> list[str]:
            answers = pages.paginate(
                Bucket=self.bucket, Prefix=self.prefix + name, Delimiter="/", **self.extra
            )
            return [
                entry["Prefix"][len(self.prefix) : -1]
                for page in answers
                for entry in page.get("CommonPrefixes", ())
            ]

        folders = filter(_DATED.fullmatch, self._request(list_folders, self.folder))
        for dated in sorted(folders, reverse=True):
            raw, checksum = (
                self._small(f"{self.prefix}{dated}/manifest.{kind}")
                for kind in ("json", "checksum")
            )
            if raw is not None and checksum is not None:
                return self._report(read_manifest(f"{self.folder}{dated}/", raw, checksum))
        day = f" of {name}" if name else ""
        raise ReportRefused(
            f"{self.folder} has no complete inventory report{day}",
            hint="S3 writes the first report within 48 hours; check "
            f"{self.source.setting('inventory')}, or list the bucket",
        )

    def find(self, since: datetime | None) -> Sequence[str]:
        last = f"{since.astimezone(UTC):%Y-%m-%dT%H-%MZ}" if since else ""
        # '0' follows '/', so the listing begins after the folder of `last`.
        begin = f"{self.prefix}{last}0" if last else self.prefix
        pages = self.client.get_paginator("list_objects_v2")

        def list_files() -> Mapping[str, set[str]]:
            files: defaultdict[str, set[str]] = defaultdict(set)
            answers = pages.paginate(
                Bucket=self.bucket, Prefix=self.prefix, StartAfter=begin, **self.extra
            )
            for page in islice(answers, MAX_FOLDER_PAGES):
                for entry in page.get("Contents", ()):
                    name, _, file = entry["Key"][len(self.prefix) :].partition("/")
                    if name > ":":  # follows '9'; the many data files of all reports are there
                        return files
                    files[name].add(file)
            return files

        reports = self._request(list_files, self.folder)
        return sorted(
            (
                name
                for name, files in reports.items()
                if files >= _COMPLETE and _DATED.fullmatch(name) and name > last
            ),
            reverse=True,
        )

    def _report(self, manifest: Manifest) -> InventoryReport:
        keeps_versions = self.listing.keeps_versions()
        manifest.require(
            self.source.bucket,
            keeps_versions=bool(keeps_versions),
            needs_storage_class=self.needs_storage_class,
        )
        if manifest.taken_at > self.listing.clock():
            raise ReportRefused(
                f"the inventory report {manifest.url} is of {manifest.taken_at:%Y-%m-%d %H:%M:%S} "
                "UTC, a time that is still to come",
                hint=OTHER_REPORT_HINT,
            )
        rows = ReportRows(
            manifest,
            self.listing.prefix.encode(),
            bool(keeps_versions),
            self.listing.all_versions,
            self.needs_storage_class,
        )
        return InventoryReport(
            url=manifest.url,
            taken_at=manifest.taken_at,
            file_count=len(manifest.files),
            size_bytes=sum(file.size_bytes for file in manifest.files),
            keeps_versions=keeps_versions,
            fetch=lambda folder: self._fetch(rows, folder),
        )

    def _small(self, key: str) -> bytes | None:
        url = f"s3://{self.bucket}/{key}"

        def read() -> bytes:
            with closing(self._get(key)) as body:
                content: bytes = body.read(MAX_MANIFEST_BYTES + 1)
                return content

        try:
            content = self._request(read, url)
        except _NoSuchObject:
            return None
        if len(content) > MAX_MANIFEST_BYTES:
            raise ReportRefused(
                f"{url} is not a manifest: it has more than {MAX_MANIFEST_BYTES:,} bytes",
                hint=OTHER_REPORT_HINT,
            )
        return content

    def _require_whole_source(self) -> None:
        """Objects that an inventory's filter leaves out would seem to be deleted.

        Skipped if the credentials may not read the configuration.
        """
        config = self.prefix.rstrip("/").rpartition("/")[2]
        try:
            answer: Any = self.policy.attempt(
                lambda: self.client.get_bucket_inventory_configuration(
                    Bucket=self.source.bucket, Id=config
                )
            )
        except REQUEST_ERRORS as error:
            if isinstance(error, ClientError) and not is_transient(error):
                return  # forbidden, not implemented, or deleted while its reports remain
            raise source_error(error, self.source) from error
        only = answer.get("InventoryConfiguration", {}).get("Filter", {}).get("Prefix", "")
        if not self.listing.prefix.startswith(only):
            raise ReportRefused(
                f"the inventory '{config}' of {self.source} has only keys that begin with "
                f"'{only}', and the source has more",
                hint=f"set {self.source.setting('prefix')} to '{only}', or remove the inventory's "
                "filter",
            )

    def _fetch(self, rows: ReportRows, folder: Path) -> Iterator[tuple[Path, ReportCounts]]:
        """Cancels downloads if it is closed early or fails."""
        stop = threading.Event()
        pool = ThreadPoolExecutor(FILES_AT_ONCE, "report")
        numbered = enumerate(rows.manifest.files)
        pending: deque[Future[tuple[Path, ReportCounts]]] = deque()

        def submit(count: int) -> None:
            for number, file in islice(numbered, count):
                pending.append(pool.submit(self._convert, rows, file, folder / f"{number}", stop))

        try:
            submit(FILES_AT_ONCE)
            while pending:
                yield pending.popleft().result()
                submit(1)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _convert(
        self, rows: ReportRows, file: ReportFile, path: Path, stop: threading.Event
    ) -> tuple[Path, ReportCounts]:
        counts = ReportCounts()
        objects = path.with_suffix(".parquet")
        with translate_errors(objects):
            try:
                self._download(rows.manifest, file, path, stop)
                write_whole(rows.read(file, path, counts), objects, SNAPSHOT_SCHEMA)
            finally:
                path.unlink(missing_ok=True)
        return objects, counts

    def _download(
        self, manifest: Manifest, file: ReportFile, path: Path, stop: threading.Event
    ) -> None:
        def fetch() -> tuple[int, str]:
            digest, size_bytes = hashlib.md5(usedforsecurity=False), 0
            with closing(self._get(file.key)) as body, path.open("wb") as local:
                while chunk := body.read(CHUNK_BYTES):
                    if stop.is_set():
                        raise _Stopped
                    digest.update(chunk)
                    local.write(chunk)
                    size_bytes += len(chunk)
            return size_bytes, digest.hexdigest()

        url = f"s3://{self.bucket}/{file.key}"
        try:
            # A long download is not reported as a missing answer.
            size_bytes, md5 = self._request(fetch, url, attempt=self.policy.retried)
        except _NoSuchObject:
            raise ReportRefused(
                f"the file {url} of the inventory report {manifest.url} is missing",
                hint=OTHER_REPORT_HINT,
            ) from None
        if size_bytes != file.size_bytes:
            what = f"{size_bytes:,} bytes, and its manifest says {file.size_bytes:,}"
        elif md5 != file.md5:
            what = "another MD5 than in its manifest"
        else:
            return
        raise ReportRefused(
            f"the file {url} of the inventory report {manifest.url} has {what}",
            hint=OTHER_REPORT_HINT,
        )

    def _get(self, key: str) -> Any:  # noqa: ANN401 - botocore's body has no public type
        return self.client.get_object(Bucket=self.bucket, Key=key, **self.extra)["Body"]

    def _request(
        self,
        call: Callable[[], T],
        url: str,
        *,
        attempt: Callable[[Callable[[], T]], T] | None = None,
    ) -> T:
        try:
            return (attempt or self.policy.attempt)(call)
        except REQUEST_ERRORS as error:
            raise self._error(error, url) from error

    def _error(self, error: Exception, url: str) -> CafError:
        at = BucketAddress(self.source.source, self.bucket, self.source.endpoint)
        if isinstance(error, ClientError) and not is_transient(error):
            if code_of(error) in _MISSING:
                return _NoSuchObject(f"{url} does not exist")
            if code_of(error) == "NoSuchBucket":
                return BucketMissing(
                    f"there is no {at}", hint=f"check {self.source.setting('inventory')}"
                )
            if code_of(error) == _IN_COLD_STORAGE:
                return ReportRefused(
                    f"{url} is in cold storage", hint=f"restore it there, {OTHER_REPORT_HINT}"
                )
            is_key_error = code_of(error).startswith(_KMS_PREFIX)
            if is_key_error or code_of(error) in ("AccessDenied", "403"):
                return SourceDenied(
                    f"{url} may not be read with the credentials of source '{self.source.source}'"
                    f"{f': {code_of(error)}' if is_key_error else ''}",
                    hint=f"grant s3:ListBucket and s3:GetObject on '{self.bucket}', and "
                    "kms:Decrypt on the key of its reports",
                )
        return source_error(error, at)


class _NoSuchObject(CafError): ...
