"""S3 Inventory's reports of a source: which there are, and their files, fetched and verified.

A report is a folder named after its time, with a manifest; S3 writes the manifest's checksum last,
so that a report without it is not complete yet. The files are elsewhere, as the manifest says.
Source: "Locating your inventory list" in the Amazon S3 User Guide.
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
    ASKING_FAILED,
    Asking,
    BucketAddress,
    code_of,
    is_transient,
    source_error,
)
from caf_pipeline.source.s3.listing import Listing
from caf_pipeline.source.s3.report_manifest import AGAIN, Manifest, ReportFile, read_manifest
from caf_pipeline.source.s3.report_rows import ReportRows
from caf_pipeline.system.parquet import translate_errors, write_whole

FILES_AT_ONCE: Final = 4
"""Fetched and read side by side.

Each takes 150 to 250 MiB of memory, as measured with files of 10^6 rows in each format.
"""

MAX_MANIFEST_BYTES: Final = 64 << 20
"""A manifest has some 180 bytes for each file; 10^8 objects of a bucket took 516 files."""

CHUNK_BYTES: Final = 1 << 20  # read at once while a file is fetched

MOST_PAGES: Final = 10
"""Of the folders of reports that are looked through for new ones: the daily reports of ten years
have seven.
"""

T = TypeVar("T")

_DATED: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\dZ")
_DAY: Final = "0000-00-00"
_MINUTE: Final = f"{_DAY}T00-00Z"
"""The forms of a day and of a report's whole name."""
_PARTS: Final = frozenset({"manifest.json", "manifest.checksum"})
"""What a complete report has in its folder."""
_MISSING: Final = frozenset({"NoSuchKey", "404"})
_IN_COLD_STORAGE: Final = "InvalidObjectState"
_OF_KEY: Final = "KMS."
"""What S3's codes begin with where a key is disabled, gone, or not to be used."""


class _Stopped(Exception):
    """The file is not wanted any more, since another one failed."""


@dataclass(frozen=True)
class Reports:
    """The reports in a folder, of the bucket that `listing` is of, whose credentials and endpoint
    they are read with.

    Attributes:
        folder: its address, `s3://…/`; "" where the settings name none.
        extra: parameters of every request, e.g. who pays.
        needs_storage_class: whether the source leaves out objects by it, so that each must have it.
    """

    client: S3Client
    asking: Asking
    listing: Listing
    folder: str
    extra: Mapping[str, Any]
    needs_storage_class: bool

    @property
    def source(self) -> BucketAddress:
        """The bucket that the reports are of."""
        return self.asking.at

    @property
    def bucket(self) -> str:
        """The bucket that the reports are in."""
        return self.folder.removeprefix("s3://").partition("/")[0]

    @property
    def prefix(self) -> str:
        """What the keys of manifests begin with."""
        return self.folder.removeprefix("s3://").partition("/")[2]

    def open(self, name: str) -> InventoryReport:
        """See `ObjectSource.open_report`."""
        if not self.folder:
            raise SettingsError(
                f"source '{self.source.source}' has no inventory reports: "
                f"{self.source.setting('inventory')} is not set",
                hint="docs/how-to/inventory-reports.md says how S3 Inventory is set up",
            )
        if name and not (len(name) >= len(_DAY) and _DATED.fullmatch(name + _MINUTE[len(name) :])):
            raise UsageError(
                f"{name!r} is neither the day of an inventory report nor the name of its folder",
                hint="give the day as YYYY-MM-DD, or the folder's name, as 2026-11-21T01-00Z",
            )
        self._require_whole()
        for dated in self._dated(name):
            manifest = self._manifest(dated)
            if manifest is not None:
                return self._report(manifest)
        of = f" of {name}" if name else ""
        raise ReportRefused(
            f"there is no complete inventory report{of} in {self.folder}",
            hint="S3 writes the first one within 48 hours; check "
            f"{self.source.setting('inventory')}, or list the bucket",
        )

    def find(self, since: datetime | None) -> Sequence[str]:
        """See `ObjectSource.find_reports`."""
        named = f"{since.astimezone(UTC):%Y-%m-%dT%H-%MZ}" if since else ""
        begin = (
            f"{self.prefix}{named}0" if named else self.prefix
        )  # '0' comes behind '/', so that its own folder is left out
        pages = self.client.get_paginator("list_objects_v2")

        def listed() -> Mapping[str, set[str]]:
            found: defaultdict[str, set[str]] = defaultdict(set)
            asked = pages.paginate(
                Bucket=self.bucket, Prefix=self.prefix, StartAfter=begin, **self.extra
            )
            for entry in (
                entry for page in islice(asked, MOST_PAGES) for entry in page.get("Contents", ())
            ):
                name, _, file = entry["Key"][len(self.prefix) :].partition("/")
                if (
                    name > ":"
                    # which comes behind '9': the files of all reports are there, as many as there
                    # are
                ):
                    break
                found[name].add(file)
            return found

        complete = [
            name for name, files in self._asked(listed, self.folder).items() if files >= _PARTS
        ]
        return sorted(
            (name for name in complete if _DATED.fullmatch(name) and name > named), reverse=True
        )

    def _report(self, manifest: Manifest) -> InventoryReport:
        told = self.listing.keeps_versions()
        keeps_versions = bool(told)
        manifest.require(
            self.source.bucket,
            keeps_versions=keeps_versions,
            needs_storage_class=self.needs_storage_class,
        )
        if manifest.taken_at > self.listing.clock():
            raise ReportRefused(
                f"the inventory report {manifest.url} is of {manifest.taken_at:%Y-%m-%d %H:%M:%S} "
                "UTC, which is still to come",
                hint=AGAIN,
            )
        listing = self.listing
        rows = ReportRows(
            manifest,
            listing.prefix.encode(),
            keeps_versions,
            listing.all_versions,
            self.needs_storage_class,
        )
        return InventoryReport(
            url=manifest.url,
            taken_at=manifest.taken_at,
            file_count=len(manifest.files),
            size_bytes=sum(file.size_bytes for file in manifest.files),
            keeps_versions=told,
            fetch=lambda folder: self._fetched(rows, folder),
        )

    # --- which report
    # --------------------------------------------------------------------------------

    def _dated(self, name: str) -> list[str]:
        """Return the names of the folders of reports that begin so, the newest first."""
        pages = self.client.get_paginator("list_objects_v2")

        def listed() -> list[str]:
            asked = pages.paginate(
                Bucket=self.bucket, Prefix=self.prefix + name, Delimiter="/", **self.extra
            )
            return [
                each["Prefix"][len(self.prefix) : -1]
                for page in asked
                for each in page.get("CommonPrefixes", ())
            ]

        return sorted(filter(_DATED.fullmatch, self._asked(listed, self.folder)), reverse=True)

    def _manifest(self, dated: str) -> Manifest | None:
        """Return what the manifest of a report says; None where the report is not complete."""
        raw, checksum = (
            self._small(f"{self.prefix}{dated}/manifest.{kind}") for kind in ("json", "checksum")
        )
        return (
            None
            if raw is None or checksum is None
            else read_manifest(f"{self.folder}{dated}/", raw, checksum)
        )

    def _small(self, key: str) -> bytes | None:
        """Return the content of an object of at most MAX_MANIFEST_BYTES; None where there is
        none.
        """
        url = f"s3://{self.bucket}/{key}"

        def read() -> bytes:
            with closing(self._get(key)) as body:
                content: bytes = body.read(MAX_MANIFEST_BYTES + 1)
                return content

        try:
            content = self._asked(read, url)
        except _NoSuchObject:
            return None
        if len(content) > MAX_MANIFEST_BYTES:
            raise ReportRefused(
                f"{url} has more than {MAX_MANIFEST_BYTES:,} bytes: it is not a manifest",
                hint=AGAIN,
            )
        return content

    def _require_whole(self) -> None:
        """Refuse an inventory whose own filter leaves out some of the source; it is asked for where
        that is permitted.

        Every object that it leaves out would look as if it were gone.
        """
        config = self.prefix.rstrip("/").rpartition("/")[2]
        try:
            answer: Any = self.asking.attempt(
                lambda: self.client.get_bucket_inventory_configuration(
                    Bucket=self.source.bucket, Id=config
                )
            )
        except ASKING_FAILED as error:
            if isinstance(error, ClientError) and not is_transient(error):
                # not permitted, not implemented, or removed since: reports that were written are
                # still there
                return
            raise source_error(error, self.source) from error
        only = answer.get("InventoryConfiguration", {}).get("Filter", {}).get("Prefix", "")
        if not self.listing.prefix.startswith(only):
            raise ReportRefused(
                f"the inventory '{config}' of {self.source} has only keys that begin with "
                f"'{only}', and the source has more",
                hint=f"set {self.source.setting('prefix')} to '{only}', or remove the filter of "
                "the inventory",
            )

    # --- files
    # --------------------------------------------------------------------------------

    def _fetched(self, rows: ReportRows, folder: Path) -> Iterator[tuple[Path, ReportCounts]]:
        """See `InventoryReport.fetch`.

        After an error, or where not all are wanted, files under way are given up.
        """
        stop = threading.Event()
        pool = ThreadPoolExecutor(FILES_AT_ONCE, "report")
        numbered = enumerate(rows.manifest.files)
        waiting: deque[Future[tuple[Path, ReportCounts]]] = deque()

        def submit(count: int) -> None:
            for number, file in islice(numbered, count):
                waiting.append(pool.submit(self._taken, rows, file, folder / f"{number}", stop))

        try:
            submit(FILES_AT_ONCE)
            while waiting:
                yield waiting.popleft().result()
                submit(1)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _taken(
        self, rows: ReportRows, file: ReportFile, path: Path, stop: threading.Event
    ) -> tuple[Path, ReportCounts]:
        """Fetch a file, verify it, and write what it has of the source's objects."""
        counts = ReportCounts()
        taken = path.with_suffix(".parquet")
        with translate_errors(taken):
            try:
                self._download(rows.manifest, file, path, stop)
                write_whole(rows.read(file, path, counts), taken, SNAPSHOT_SCHEMA)
            finally:
                path.unlink(missing_ok=True)
        return taken, counts

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
            size_bytes, md5 = self._asked(
                fetch, url, attempt=self.asking.retried
            )  # a long body is no missing answer
        except _NoSuchObject:
            raise ReportRefused(
                f"the file {url} of the inventory report {manifest.url} is missing", hint=AGAIN
            ) from None
        if size_bytes != file.size_bytes:
            what = f"{size_bytes:,} bytes, and its manifest says {file.size_bytes:,}"
        elif md5 != file.md5:
            what = "another MD5 than its manifest says"
        else:
            return
        raise ReportRefused(
            f"the file {url} of the inventory report {manifest.url} has {what}", hint=AGAIN
        )

    # --- requests
    # --------------------------------------------------------------------------------

    def _get(self, key: str) -> Any:  # noqa: ANN401 - botocore's body has no public type
        return self.client.get_object(Bucket=self.bucket, Key=key, **self.extra)["Body"]

    def _asked(
        self,
        call: Callable[[], T],
        url: str,
        *,
        attempt: Callable[[Callable[[], T]], T] | None = None,
    ) -> T:
        """Return what `call` does, tried again while it fails transiently; raise what its failure
        is to the user.
        """
        try:
            return (attempt or self.asking.attempt)(call)
        except ASKING_FAILED as error:
            raise self._error(error, url) from error

    def _error(self, error: Exception, url: str) -> CafError:
        at = BucketAddress(self.source.source, self.bucket, self.source.endpoint)
        if isinstance(error, ClientError) and not is_transient(error):
            if code_of(error) in _MISSING:
                return _NoSuchObject(f"there is no {url}")
            if code_of(error) == "NoSuchBucket":
                return BucketMissing(
                    f"there is no {at}", hint=f"check {self.source.setting('inventory')}"
                )
            if code_of(error) == _IN_COLD_STORAGE:
                return ReportRefused(f"{url} is in cold storage", hint=f"restore it there, {AGAIN}")
            of_key = code_of(error).startswith(_OF_KEY)
            if of_key or code_of(error) in ("AccessDenied", "403"):
                return SourceDenied(
                    f"{url} may not be read with the credentials of source '{self.source.source}'"
                    f"{f': {code_of(error)}' if of_key else ''}",
                    hint=f"grant s3:ListBucket and s3:GetObject on '{self.bucket}', and "
                    "kms:Decrypt on the key of its reports",
                )
        return source_error(error, at)


class _NoSuchObject(CafError):
    """There is no object of this key; whoever asks says what that means."""
