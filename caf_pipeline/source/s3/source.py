"""`ObjectSource` on S3 and whatever speaks its API."""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from caf_pipeline.errors import ObjectUnavailable
from caf_pipeline.inventory.objects import S3Object, SkipReason, is_supported
from caf_pipeline.settings import SourceSettings
from caf_pipeline.source.protocol import (
    Checksum,
    InventoryReport,
    ObjectHead,
    ObjectPart,
    PendingRead,
)
from caf_pipeline.source.s3.client_type import S3Client
from caf_pipeline.source.s3.clients import bucket_region, build_client, is_aws
from caf_pipeline.source.s3.errors import BucketAddress, RequestPolicy
from caf_pipeline.source.s3.get import S3ObjectReader
from caf_pipeline.source.s3.get_client import GetClient
from caf_pipeline.source.s3.listing import PAGE_KEYS, Listing, RequestRate
from caf_pipeline.source.s3.reports import Reports
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

DEFAULT_ATTEMPTS = 6


class S3Source:
    """See `ObjectSource`."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        client: S3Client,
        gets: GetClient,
        *,
        name: str = "",
        requester_pays: bool = False,
        attempts: int = DEFAULT_ATTEMPTS,
        page_keys: int = PAGE_KEYS,
        listing_rate: float = 0,
        waits: Waits | None = None,
        inventory: str = "",
        all_versions: bool = False,
        needs_storage_class: bool = False,
    ) -> None:
        """Create a source from a boto3 client and the GET client built from it.

        `name` is for hints. `listing_rate` is in requests per second, 0 for no limit. `inventory`
        is the folder of reports, or "".
        """
        at = BucketAddress(name, bucket, client.meta.endpoint_url)
        extra = {"RequestPayer": "requester"} if requester_pays else {}
        self._at = at
        policy = RequestPolicy(at, attempts, waits or Waits())
        self._listing = Listing(
            client, policy, prefix, extra, page_keys, all_versions, RequestRate(listing_rate)
        )
        self._reports = Reports(
            client, policy, self._listing, inventory, extra, needs_storage_class
        )
        self._reading = S3ObjectReader(client, gets, policy, extra, has_reports=bool(inventory))

    def list_pages(
        self,
        *,
        after: bytes = b"",
        max_pages: int | None = None,
        in_order: bool = False,
        versions: bool = False,
        by_version: bool | None = None,
    ) -> Iterator[Sequence[S3Object]]:
        return self._listing.pages(
            after, max_pages, in_order=in_order, versions=versions, by_version=by_version
        )

    def keeps_versions(self) -> bool | None:
        return self._listing.keeps_versions()

    def open_report(self, name: str = "") -> InventoryReport:
        return self._reports.open(name)

    def find_reports(self, since: datetime | None) -> Sequence[str]:
        """Hundreds of reports take more than one request."""
        return self._reports.find(since)

    def read(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        if not 0 <= start_byte <= end_byte <= obj.size_bytes or (
            start_byte == end_byte and obj.size_bytes
        ):
            raise ValueError(f"[{start_byte}, {end_byte}) is no range of {obj.size_bytes} bytes")
        self._require_text(obj)
        return self._reading.part(obj, start_byte, end_byte)

    def begin(
        self, obj: S3Object, start_byte: int, end_byte: int, ended: Callable[[], None]
    ) -> PendingRead | None:
        if not is_supported(obj.key):
            return None
        return self._reading.begin(obj, start_byte, end_byte, ended)

    def full_object_checksum(self, obj: S3Object) -> Checksum | None:
        self._require_text(obj)
        return self._reading.checksum(obj)

    def read_headers(self, obj: S3Object) -> ObjectHead:
        self._require_text(obj)
        return self._reading.read_headers(obj)

    def clock(self) -> datetime:
        """Reads the Date of an answer (RFC 9110, 6.6.1)."""
        return self._listing.clock()

    def _require_text(self, obj: S3Object) -> None:
        if not is_supported(obj.key):
            reason = SkipReason.UNSUPPORTED_KEY
            raise ObjectUnavailable(
                f"{self._at.of(obj.key)} has a key that cannot be requested", reason=reason
            )


def open_s3_source(
    name: str,
    settings: SourceSettings,
    *,
    attempts: int = DEFAULT_ATTEMPTS,
    connections: int | None = None,
    client: "S3Client | None" = None,
    waits: Waits | None = None,
) -> S3Source:
    """Return the source that the settings name. On AWS, asks for its bucket's region.

    `connections` limits concurrent GETs; None leaves the limit to awscrt. The retries of `client`
    multiply with `attempts`. Raises SettingsError.
    """
    client = client or build_client(settings)
    with (waits or Waits()).waiting(
        f"AWS to report the region of bucket '{settings.bucket}'",
        ends_by="an answer ends it, or the connection timeout",
        grace=UNANSWERED_SECONDS,
    ):
        region = bucket_region(client, settings.bucket) if is_aws(client) else None
    gets = GetClient(
        client,
        settings.bucket,
        requester_pays=settings.requester_pays,
        region=region,
        connections=connections,
    )
    return S3Source(
        settings.bucket,
        settings.prefix,
        client,
        gets,
        name=name,
        requester_pays=settings.requester_pays,
        attempts=attempts,
        listing_rate=settings.listing_requests_per_second,
        waits=waits,
        inventory=settings.inventory,
        all_versions=settings.versions == "all",
        needs_storage_class=bool(settings.storage_classes),
    )
