"""An event queue of a test's bucket."""

import json

import boto3

from caf_pipeline.steps.notices import drain_queue
from caf_pipeline.wiring import open_queue
from caf_pipeline_tests.support.pipeline_runs import SOURCE, with_source
from caf_pipeline_tests.support.s3_server import KEY_ID, SECRET
from caf_pipeline_tests.support.ticks import evaluate_tick

SENSOR = "caf_new_objects_my_source"


class Queue:
    """A queue on the S3 server, to which the bucket sends its events."""

    def __init__(self, pipeline):
        self.bucket = pipeline.bucket
        keys = {
            "aws_access_key_id": KEY_ID,
            "aws_secret_access_key": SECRET,
            "region_name": "us-east-1",
        }
        self.client = boto3.client("sqs", endpoint_url=pipeline.bucket.endpoint, **keys)
        self.url = self.client.create_queue(QueueName=pipeline.bucket.name)["QueueUrl"]
        self.pipeline = with_source(pipeline, queue=self.url, prefix="")
        self.context = self.pipeline.run_context()
        self.queue = open_queue(self.pipeline.settings, SOURCE)

    def notify(self) -> None:
        """Let the bucket send its events to the queue."""
        arn = self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=["QueueArn"])[
            "Attributes"
        ]["QueueArn"]
        configuration = {
            "QueueConfigurations": [
                {"QueueArn": arn, "Events": ["s3:ObjectCreated:*", "s3:ObjectRemoved:*"]}
            ]
        }
        self.bucket.client.put_bucket_notification_configuration(
            Bucket=self.bucket.name, NotificationConfiguration=configuration
        )

    def notify_by_eventbridge(self) -> None:
        """Let the bucket send events to EventBridge, and a rule send three kinds to the queue."""
        arn = self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=["QueueArn"])[
            "Attributes"
        ]["QueueArn"]
        keys = {
            "aws_access_key_id": KEY_ID,
            "aws_secret_access_key": SECRET,
            "region_name": "us-east-1",
        }
        events = boto3.client("events", endpoint_url=self.bucket.endpoint, **keys)
        kinds = ["Object Created", "Object Deleted", "Object Restore Completed"]
        pattern = {
            "source": ["aws.s3"],
            "detail-type": kinds,
            "detail": {"bucket": {"name": [self.bucket.name]}},
        }
        events.put_rule(Name=self.bucket.name, EventPattern=json.dumps(pattern))
        events.put_targets(Rule=self.bucket.name, Targets=[{"Id": "queue", "Arn": arn}])
        configuration = {"EventBridgeConfiguration": {}}
        self.bucket.client.put_bucket_notification_configuration(
            Bucket=self.bucket.name, NotificationConfiguration=configuration
        )

    def send(
        self,
        *keys: str,
        name: str = "ObjectCreated:Put",
        sequencer: str | None = None,
        bucket: str | None = None,
    ) -> None:
        for key in keys:
            event_object = {"key": key} | ({"sequencer": sequencer} if sequencer else {})
            record = {
                "eventName": name,
                "s3": {"bucket": {"name": bucket or self.bucket.name}, "object": event_object},
            }
            self.send_text(json.dumps({"Records": [record]}))

    def send_text(self, text: str) -> None:
        self.client.send_message(QueueUrl=self.url, MessageBody=text)

    def left(self) -> int:
        """Return the number of messages, including received ones that are not deleted."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        return sum(
            int(count)
            for count in self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=names)[
                "Attributes"
            ].values()
        )

    def noticed(self) -> list[bytes]:
        return list(self.context.ledger.notices.noticed_keys(SOURCE, b"", 1000))

    def tick(self, cursor: str | None = None):
        return evaluate_tick(self.pipeline, SENSOR, cursor)

    def drain(self) -> None:
        drain_queue(self.context, self.queue, enough=lambda: False)

    def plan(self, request=None) -> None:
        options = {"run_config": dict(request.run_config)} if request else {}
        assert self.pipeline.execute("caf_plan_my_source", **options).success
