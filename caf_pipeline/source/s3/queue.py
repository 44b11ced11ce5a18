"""S3's events in a queue of SQS, as its own notifications or by way of EventBridge, and what they
name.

Whoever may send to the queue can write anything there, so nothing of a message is believed but the
key: that somebody should look at it. Source: "Event message structure" and "EventBridge event
message structure" in the Amazon S3 User Guide; ReceiveMessage and DeleteMessageBatch in the Amazon
SQS API Reference; "Parsing Amazon SNS message formats" in the Amazon SNS Developer Guide. That keys
are not encoded in EventBridge's form the guides leave out; it was tried by
aws-solutions-library-samples/ guidance-for-medialake-on-aws, pull request 21, with keys such as
`%2B++ %20.mp3`.
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
"""SQS's limit of messages in one request."""

HIDDEN_SECONDS: Final = 60
"""For which no other receiver is given a message: longer than a tick, which deletes it or dies."""

WAIT_SECONDS: Final = 1
"""With no wait SQS asks only some of its servers, and may say that there is nothing where there is
something.
"""

_TEST_EVENT: Final = "s3:TestEvent"
_RESTORED: Final = (
    "ObjectRestore:Completed",
    "s3:ObjectRestore:Completed",
    "Object Restore Completed",
)
_BY_SNS: Final = "Notification"
_DETAIL_TYPE: Final = "detail-type"
"""What each event of EventBridge has, and no notification of S3."""

_OF_S3: Final = "aws.s3"
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
    """The queue of a source; see `EventQueue`.

    `url` names it, `bucket` and `prefix` are what its events must be of.

    `bucket` is "" where it is not known: events name the bucket itself, and the source an access
    point of it.
    """

    client: Any
    source: str
    url: str
    bucket: str
    prefix: bytes

    def receive(self) -> Sequence[QueueMessage]:
        """Return up to ten messages."""
        asked = {
            "MaxNumberOfMessages": BATCH,
            "VisibilityTimeout": HIDDEN_SECONDS,
            "WaitTimeSeconds": WAIT_SECONDS,
        }
        try:
            answer = self.client.receive_message(QueueUrl=self.url, **asked)
            return [self._message(one) for one in answer.get("Messages", ())]
        except (ClientError, BotoCoreError) as error:
            raise self._error(error, "sqs:ReceiveMessage") from error

    def delete(self, messages: Sequence[QueueMessage]) -> None:
        """Delete messages, ten a request."""
        try:
            for start in range(0, len(messages), BATCH):
                some = messages[start : start + BATCH]
                entries = [
                    {"Id": str(number), "ReceiptHandle": one.receipt}
                    for number, one in enumerate(some)
                ]
                self.client.delete_message_batch(QueueUrl=self.url, Entries=entries)
        except (ClientError, BotoCoreError) as error:
            raise self._error(error, "sqs:DeleteMessage") from error

    def _message(self, message: Mapping[str, Any]) -> QueueMessage:
        body = message.get("Body", "")
        events, wrong = events_of(body, self.bucket)
        ours = [event for event in events if event.key.startswith(self.prefix)]
        encoded = body.encode("utf-8", "surrogatepass")
        return QueueMessage(message["MessageId"], message["ReceiptHandle"], encoded, ours, wrong)

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
                return SourceError(f"the queue {self.url} refuses: {code}", hint=f"check {setting}")
            return SourceUnreachable(
                f"the queue {self.url} answers with {code}", hint="wait, and try again"
            )
        if isinstance(error, NoCredentialsError):
            hint = (
                f"set the credentials of source '{self.source}', which are also used for its queue"
            )
            return SourceDenied(f"there are no credentials for the queue {self.url}", hint=hint)
        return SourceUnreachable(
            f"the queue {self.url} cannot be asked: {first_line(error)}", hint=f"check {setting}"
        )


def open_event_queue(source: str, settings: SourceSettings) -> S3EventQueue:
    """Open the queue that the settings of a source name, with the source's own credentials; nothing
    is asked of the network.
    """
    bucket = "" if names_access_point(settings.bucket) else settings.bucket
    return S3EventQueue(
        build_queue_client(settings), source, settings.queue, bucket, settings.prefix.encode()
    )


def events_of(body: str, bucket: str) -> tuple[Sequence[ObjectEvent], str]:
    """Return the events of a bucket that a message has, and why the message, or a part of it, is
    none; "" where all of it is.

    `bucket` "" stands for any.
    """
    try:
        said = json.loads(body)
        if (
            isinstance(said, dict)
            and said.get("Type") == _BY_SNS
            and isinstance(said.get("Message"), str)
        ):
            said = json.loads(said["Message"])
    except (ValueError, RecursionError):
        return (), "it is not JSON"
    if not isinstance(said, dict):
        return (), "it is not a JSON object"
    if said.get("Event") == _TEST_EVENT:
        other = bucket and said.get("Bucket") != bucket
        return (), f"it is a test event of another bucket than '{bucket}'" if other else ""
    bridged = _DETAIL_TYPE in said
    records = [said] if bridged else said.get("Records")
    if not isinstance(records, list) or not records:
        lacks = (
            "it has no Records, as a notification of S3 has, and no detail-type, as an event "
            "of EventBridge has"
        )
        return (), f"{lacks}: the target of a rule must have no input transformer"
    events, wrong = [], []
    for record in records:
        try:
            events.append(_bridged(record, bucket) if bridged else _notified(record, bucket))
        except ValueError as error:
            wrong.append(str(error))
    return events, "; ".join(sorted(set(wrong)))


def _notified(record: object, bucket: str) -> ObjectEvent:
    """Return the event of a record of S3's own notifications; its key is encoded as forms are.

    Raises as `_event` does.
    """
    its = _part(record, "s3")
    kind = record.get("eventName") if isinstance(record, dict) else None
    return _event(its, bucket, kind=kind, encoded=True)


def _bridged(said: Mapping[str, Any], bucket: str) -> ObjectEvent:
    """Return the event of a message of EventBridge; its key is as it is. Raises as `_event`
    does.
    """
    if said.get("source") != _OF_S3:
        raise ValueError(
            f"it is an event of EventBridge that is not of S3: its source is not '{_OF_S3}'"
        )
    return _event(_part(said, "detail"), bucket, kind=said[_DETAIL_TYPE], encoded=False)


def _event(its: Mapping[str, Any], bucket: str, *, kind: object, encoded: bool) -> ObjectEvent:
    """Return the event with this bucket and object, whatever its kind, or raise ValueError with
    what is wrong with it.
    """
    said = _part(its, "bucket").get("name")
    if bucket and said != bucket:
        raise ValueError(f"it has an event of another bucket than '{bucket}'")
    its = _part(its, "object")
    text, sequencer = its.get("key"), its.get("sequencer", "")
    if not isinstance(text, str) or not text:
        raise ValueError("it has an event without a key")
    key = text.encode("utf-8", "surrogatepass")
    if encoded:
        key = unquote_to_bytes(key.replace(b"+", b" "))
    if len(key) > MAX_KEY_BYTES:
        raise ValueError(f"it has a key of more than {MAX_KEY_BYTES:,} bytes")
    known = isinstance(sequencer, str) and _HEXADECIMAL.fullmatch(sequencer)
    return ObjectEvent(key, sequencer.upper() if known else "", restored=kind in _RESTORED)


def _part(of: object, name: str) -> Mapping[str, Any]:
    part = of.get(name) if isinstance(of, dict) else None
    if not isinstance(part, dict):
        raise ValueError(f"it has an event without '{name}'")
    return part
