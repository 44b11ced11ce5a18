"""S3's event notifications in a queue of SQS, and what they name.

Whoever may send to the queue can write anything there, so nothing of a message is believed but the key: that somebody should look
at it.
Source: "Event message structure" in the Amazon S3 User Guide; ReceiveMessage and DeleteMessageBatch in the Amazon SQS API
Reference; "Parsing Amazon SNS message formats" in the Amazon SNS Developer Guide.
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
"""With no wait SQS asks only some of its servers, and may say that there is nothing where there is something."""

_TEST_EVENT: Final = "s3:TestEvent"
_RESTORED: Final = ("ObjectRestore:Completed", "s3:ObjectRestore:Completed")
_BY_SNS: Final = "Notification"
_HEXADECIMAL: Final = re.compile(r"[0-9A-Fa-f]{1,64}")
_NO_QUEUE: Final = ("NonExistentQueue", "QueueDoesNotExist")
_DENIED: Final = ("AccessDenied", "AuthFailure", "InvalidClientTokenId", "SignatureDoesNotMatch", "ExpiredToken")


@dataclass(frozen=True)
class S3EventQueue:
    """The queue of a source; see `EventQueue`. `url` names it, `bucket` and `prefix` are what its events must be of.

    `bucket` is "" where it is not known: events name the bucket itself, and the source an access point of it.
    """

    client: Any
    source: str
    url: str
    bucket: str
    prefix: bytes

    def receive(self) -> Sequence[QueueMessage]:
        """Return up to ten messages."""
        asked = {"MaxNumberOfMessages": BATCH, "VisibilityTimeout": HIDDEN_SECONDS, "WaitTimeSeconds": WAIT_SECONDS}
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
                entries = [{"Id": str(number), "ReceiptHandle": one.receipt} for number, one in enumerate(some)]
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
                return SourceDenied(f"the queue {self.url} may not be used with these credentials: {code}", hint=hint)
            if not is_transient(error):
                return SourceError(f"the queue {self.url} refuses: {code}", hint=f"check {setting}")
            return SourceUnreachable(f"the queue {self.url} answers with {code}", hint="wait, and try again")
        if isinstance(error, NoCredentialsError):
            hint = f"set the credentials of source '{self.source}', which are also used for its queue"
            return SourceDenied(f"there are no credentials for the queue {self.url}", hint=hint)
        return SourceUnreachable(f"the queue {self.url} cannot be asked: {first_line(error)}", hint=f"check {setting}")


def open_event_queue(source: str, settings: SourceSettings) -> S3EventQueue:
    """Open the queue that the settings of a source name, with the source's own credentials; nothing is asked of the network."""
    bucket = "" if names_access_point(settings.bucket) else settings.bucket
    return S3EventQueue(build_queue_client(settings), source, settings.queue, bucket, settings.prefix.encode())


def events_of(body: str, bucket: str) -> tuple[Sequence[ObjectEvent], str]:
    """Return the events of a bucket that a message has, and why the message, or a part of it, is none; "" where all of it is.

    `bucket` "" stands for any.
    """
    try:
        said = json.loads(body)
        if isinstance(said, dict) and said.get("Type") == _BY_SNS and isinstance(said.get("Message"), str):
            said = json.loads(said["Message"])
    except (ValueError, RecursionError):
        return (), "it is not JSON"
    if not isinstance(said, dict):
        return (), "it is not a JSON object"
    if said.get("Event") == _TEST_EVENT:
        other = bucket and said.get("Bucket") != bucket
        return (), f"it is a test event of another bucket than '{bucket}'" if other else ""
    records = said.get("Records")
    if not isinstance(records, list) or not records:
        return (), "it is not an event notification of S3: it has no Records"
    events, wrong = [], []
    for record in records:
        try:
            events.append(_event(record, bucket))
        except ValueError as error:
            wrong.append(str(error))
    return events, "; ".join(sorted(set(wrong)))


def _event(record: object, bucket: str) -> ObjectEvent:
    """Return the event of a record, or raise ValueError with what is wrong with it."""
    said = _part(_part(record, "s3"), "bucket").get("name")
    if bucket and said != bucket:
        raise ValueError(f"it has an event of another bucket than '{bucket}'")
    its = _part(_part(record, "s3"), "object")
    key, sequencer = its.get("key"), its.get("sequencer", "")
    if not isinstance(key, str) or not key:
        raise ValueError("it has an event without a key")
    decoded = unquote_to_bytes(key.replace("+", " "))
    if len(decoded) > MAX_KEY_BYTES:
        raise ValueError(f"it has a key of more than {MAX_KEY_BYTES:,} bytes")
    known = isinstance(sequencer, str) and _HEXADECIMAL.fullmatch(sequencer)
    name = record.get("eventName") if isinstance(record, dict) else None
    return ObjectEvent(decoded, sequencer.upper() if known else "", restored=name in _RESTORED)


def _part(of: object, name: str) -> Mapping[str, Any]:
    part = of.get(name) if isinstance(of, dict) else None
    if not isinstance(part, dict):
        raise ValueError(f"it has an event without '{name}'")
    return part
