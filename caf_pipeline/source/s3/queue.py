"""S3's events in an SQS queue, sent by S3 itself or by EventBridge.

Anyone who may send to the queue can write anything there, so a message's key is only a hint to look
at it. Source: "Event message structure" and "EventBridge event message structure" in the Amazon S3
User Guide; "Parsing Amazon SNS message formats" in the Amazon SNS Developer Guide. EventBridge does
not encode keys: aws-solutions-library-samples/guidance-for-medialake-on-aws, pull request 21.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from caf_pipeline.errors import CafError, SourceDenied, SourceError, SourceUnreachable, first_line
from caf_pipeline.inventory.objects import MAX_KEY_BYTES
from caf_pipeline.setting_values import names_access_point
from caf_pipeline.settings import SourceSettings
from caf_pipeline.source.protocol import ObjectEvent, QueueMessage
from caf_pipeline.source.s3.clients import build_queue_client
from caf_pipeline.source.s3.errors import code_of, is_transient

BATCH: Final = 10
"""SQS's limit."""

HIDDEN_SECONDS: Final = 60
"""Longer than a tick, which deletes a message or dies."""

WAIT_SECONDS: Final = 1
"""Long polling; otherwise SQS asks only some of its servers."""

_TEST_EVENT: Final = "s3:TestEvent"
_RESTORED: Final = (
    "ObjectRestore:Completed",
    "s3:ObjectRestore:Completed",
    "Object Restore Completed",
)
_SNS_TYPE: Final = "Notification"
_DETAIL_TYPE: Final = "detail-type"
"""No notification of S3 has it."""

_S3_SOURCE: Final = "aws.s3"
_HEXADECIMAL: Final = re.compile(r"[0-9A-Fa-f]{1,64}")
_NO_QUEUE: Final = ("NonExistentQueue", "QueueDoesNotExist")
_DENIED: Final = (
    "AccessDenied",
    "AuthFailure",
    "InvalidClientTokenId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
)


@dataclass(frozen=True)
class S3EventQueue:
    """The queue of a source. `bucket` is "" for an access point: events name its bucket."""

    client: Any
    source: str
    url: str
    bucket: str
    prefix: bytes

    def receive(self) -> Sequence[QueueMessage]:
        try:
            answer = self.client.receive_message(
                QueueUrl=self.url,
                MaxNumberOfMessages=BATCH,
                VisibilityTimeout=HIDDEN_SECONDS,
                WaitTimeSeconds=WAIT_SECONDS,
            )
        except (ClientError, BotoCoreError) as error:
            raise self._error(error, "sqs:ReceiveMessage") from error
        messages = []
        for message in answer.get("Messages", ()):
            body = message.get("Body", "")
            events, wrong = events_of(body, self.bucket)
            messages.append(
                QueueMessage(
                    message["MessageId"],
                    message["ReceiptHandle"],
                    body.encode("utf-8", "surrogatepass"),
                    [event for event in events if event.key.startswith(self.prefix)],
                    wrong,
                )
            )
        return messages

    def delete(self, messages: Sequence[QueueMessage]) -> None:
        try:
            for start in range(0, len(messages), BATCH):
                batch = messages[start : start + BATCH]
                entries = [
                    {"Id": str(number), "ReceiptHandle": message.receipt}
                    for number, message in enumerate(batch)
                ]
                self.client.delete_message_batch(QueueUrl=self.url, Entries=entries)
        except (ClientError, BotoCoreError) as error:
            raise self._error(error, "sqs:DeleteMessage") from error

    def _error(self, error: Exception, permission: str) -> CafError:
        setting = f"sources.{self.source}.queue"
        if isinstance(error, ClientError):
            code = code_of(error)
            if any(code.endswith(name) for name in _NO_QUEUE):
                return SourceError(f"there is no queue {self.url}", hint=f"correct {setting}")
            if any(name in code for name in _DENIED):
                hint = f"grant {permission} on the queue, or check the credentials of the source"
                return SourceDenied(
                    f"the queue {self.url} may not be used with these credentials: {code}",
                    hint=hint,
                )
            if not is_transient(error):
                return SourceError(
                    f"the queue {self.url} refuses the request: {code}", hint=f"check {setting}"
                )
            return SourceUnreachable(
                f"the queue {self.url} answers with {code}", hint="wait, and try again"
            )
        if isinstance(error, NoCredentialsError):
            hint = f"set the credentials of source '{self.source}', which its queue uses, too"
            return SourceDenied(f"the queue {self.url} needs credentials", hint=hint)
        return SourceUnreachable(
            f"the queue {self.url} is unreachable: {first_line(error)}", hint=f"check {setting}"
        )


def open_event_queue(source: str, settings: SourceSettings) -> S3EventQueue:
    """Open a source's queue with its credentials, without a request."""
    bucket = "" if names_access_point(settings.bucket) else settings.bucket
    return S3EventQueue(
        build_queue_client(settings), source, settings.queue, bucket, settings.prefix.encode()
    )


def events_of(body: str, bucket: str) -> tuple[Sequence[ObjectEvent], str]:
    """Return the events of a bucket in a message, and what is wrong with it, or "".

    `bucket` "" accepts any bucket.
    """
    try:
        content = json.loads(body)
        if (
            isinstance(content, dict)
            and content.get("Type") == _SNS_TYPE
            and isinstance(content.get("Message"), str)
        ):
            content = json.loads(content["Message"])
    except (ValueError, RecursionError):
        return (), "it is not JSON"
    if not isinstance(content, dict):
        return (), "it is not a JSON object"
    if content.get("Event") == _TEST_EVENT:
        is_other = bucket and content.get("Bucket") != bucket
        return (), f"it is a test event of another bucket than '{bucket}'" if is_other else ""
    if from_eventbridge := _DETAIL_TYPE in content:
        if content.get("source") != _S3_SOURCE:
            return (), f"it is an EventBridge event, but its source is not '{_S3_SOURCE}'"
        records: Any = [content]
    else:
        records = content.get("Records")
    if not isinstance(records, list) or not records:
        return (), (
            "it has neither Records, like a notification of S3, nor detail-type, like an event of "
            "EventBridge: the target of a rule must have no input transformer"
        )
    events, wrong = [], []
    for record in records:
        try:
            if from_eventbridge:
                detail, kind = _part(record, "detail"), record[_DETAIL_TYPE]
            else:
                detail, kind = _part(record, "s3"), record.get("eventName")
            events.append(_event(detail, bucket, kind=kind, encoded=not from_eventbridge))
        except ValueError as error:
            wrong.append(str(error))
    return events, "; ".join(sorted(set(wrong)))


def _event(detail: Mapping[str, Any], bucket: str, *, kind: object, encoded: bool) -> ObjectEvent:
    """`encoded`: like a form, as in S3's own notifications. Raises ValueError."""
    if bucket and _part(detail, "bucket").get("name") != bucket:
        raise ValueError(f"it has an event of another bucket than '{bucket}'")
    described = _part(detail, "object")
    text, sequencer = described.get("key"), described.get("sequencer", "")
    if not isinstance(text, str) or not text:
        raise ValueError("it has an event without a key")
    key = text.encode("utf-8", "surrogatepass")
    if encoded:
        key = unquote_to_bytes(key.replace(b"+", b" "))
    if len(key) > MAX_KEY_BYTES:
        raise ValueError(f"it has a key of more than {MAX_KEY_BYTES:,} bytes")
    is_valid = isinstance(sequencer, str) and _HEXADECIMAL.fullmatch(sequencer)
    return ObjectEvent(key, sequencer.upper() if is_valid else "", restored=kind in _RESTORED)


def _part(record: object, name: str) -> Mapping[str, Any]:
    part = record.get(name) if isinstance(record, dict) else None
    if not isinstance(part, dict):
        raise ValueError(f"it has an event without '{name}'")
    return part
