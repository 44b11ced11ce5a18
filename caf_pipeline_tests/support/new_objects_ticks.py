"""Ticks of the sensor for new objects over a paged listing."""

from caf_pipeline_tests.support.pipeline_runs import SOURCE, with_source
from caf_pipeline_tests.support.ticks import evaluate_tick


class NewObjectsTicks:
    """Ticks of the sensor for new objects, with two keys per page of a listing.

    `requests` are the kinds of requests to S3.
    """

    def __init__(self, pipeline, unruly_s3) -> None:
        unruly_s3.page_keys = 2
        self.requests: list[str] = []
        unruly_s3.order(self._note, kind=None)
        self.pipeline, self.cursor = pipeline, None
        self.set(endpoint_url=unruly_s3.endpoint)

    def _note(self, request, answer):
        self.requests.append(
            request.kind
            if request.kind != "other"
            else "versioning"
            if "versioning" in request.query
            else "bucket"
        )
        return answer

    def set(self, **changes) -> None:
        self.pipeline = with_source(self.pipeline, **changes)

    def put(self, keys: str) -> None:
        for key in keys.split():
            self.pipeline.bucket.put(key)

    def next_part(self):
        """Evaluate the next tick; return the part of the bucket that it plans, or None."""
        tick = evaluate_tick(self.pipeline, "caf_new_objects_my_source", self.cursor)
        self.cursor = tick.cursor
        if not tick.run_requests:
            return None
        (request,) = tick.run_requests
        return request.run_config["ops"]["caf_my_source__s3_inventory"]["config"]

    def plan(self, part) -> int:
        """Plan a part of the bucket; return the number of claimed objects."""
        config = {"ops": {"caf_my_source__s3_inventory": {"config": part}}}
        assert self.pipeline.execute("caf_plan_my_source", run_config=config).success
        return self.pipeline.ledger.chunks.account(SOURCE).claimed_objects
