"""The least IAM policy of a source, on a server that enforces policies."""

import copy
import json

import boto3
import httpx
import pytest
from pydantic import SecretStr

from caf_pipeline.cli.policy import least_policy
from caf_pipeline.errors import CafError
from caf_pipeline.source.s3.source import open_s3_source
from caf_pipeline_tests.support.s3_server import make_bucket, running_moto, settings_for

AS_ROOT = {"aws_access_key_id": "root", "aws_secret_access_key": "root", "region_name": "us-east-1"}


@pytest.fixture(scope="module")
def server():
    with running_moto() as address:
        yield address


def enforce(server, *, after):
    httpx.post(f"{server}/moto-api/reset-auth", content=str(after)).raise_for_status()


@pytest.fixture
def iam(server):
    enforce(server, after="inf")
    yield boto3.client("iam", endpoint_url=server, **AS_ROOT)
    enforce(server, after="inf")


def allowed(iam, server, policy, bucket):
    """Return the settings of a source whose user has a policy, and no other rights."""
    name = f"user-{bucket}"
    iam.create_user(UserName=name)
    iam.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=json.dumps(policy))
    key = iam.create_access_key(UserName=name)["AccessKey"]
    enforce(server, after=0)
    return settings_for(
        server,
        bucket,
        access_key_id=SecretStr(key["AccessKeyId"]),
        secret_access_key=SecretStr(key["SecretAccessKey"]),
    )


def archive(settings):
    """List a source and read its objects."""
    source = open_s3_source("src", settings, attempts=1)
    objects = [obj for page in source.list_pages() for obj in page]
    assert objects
    return [bytes(source.read(obj, 0, obj.size_bytes).body) for obj in objects]


def without(policy, action):
    narrower = copy.deepcopy(policy)
    for statement in narrower["Statement"]:
        statement["Action"] = [name for name in statement["Action"] if name != action] or ["s3:No"]
    return narrower


@pytest.fixture
def bucket(server, request):
    enforce(server, after="inf")
    bucket = make_bucket(server)
    if request.param:
        bucket.keep_versions()
    bucket.put("key", b"body")
    return bucket.name


@pytest.mark.parametrize("bucket", [False, True], ids=["current", "versions"], indirect=True)
def test_the_policy_lets_a_source_be_archived(iam, server, bucket):
    policy = least_policy(settings_for(server, bucket))
    assert archive(allowed(iam, server, policy, bucket)) == [b"body"]


@pytest.mark.parametrize(
    ("bucket", "action"),
    [
        (False, "s3:ListBucket"),
        (False, "s3:GetObject"),
        (True, "s3:ListBucketVersions"),
        (True, "s3:GetObjectVersion"),
    ],
    indirect=["bucket"],
)
def test_a_source_needs_each_action(iam, server, bucket, action):
    policy = without(least_policy(settings_for(server, bucket)), action)
    with pytest.raises(CafError):
        archive(allowed(iam, server, policy, bucket))


def test_a_policy_names_prefix_reports_and_queue():
    source = settings_for(
        "https://s3.cn-north-1.amazonaws.com.cn",
        "photos",
        region="cn-north-1",
        prefix="2024/",
        inventory="s3://reports/daily/photos/all/",
        queue="https://sqs.cn-north-1.amazonaws.com.cn/111122223333/events",
    )
    resources = {
        (statement["Resource"], action)
        for statement in least_policy(source)["Statement"]
        for action in statement["Action"]
    }
    assert resources == {
        ("arn:aws-cn:s3:::photos", "s3:GetBucketVersioning"),
        ("arn:aws-cn:s3:::photos", "s3:GetInventoryConfiguration"),
        ("arn:aws-cn:s3:::photos", "s3:ListBucket"),
        ("arn:aws-cn:s3:::photos", "s3:ListBucketVersions"),
        ("arn:aws-cn:s3:::photos/2024/*", "s3:GetObject"),
        ("arn:aws-cn:s3:::photos/2024/*", "s3:GetObjectVersion"),
        ("arn:aws-cn:s3:::reports", "s3:ListBucket"),
        ("arn:aws-cn:s3:::reports/daily/photos/all/*", "s3:GetObject"),
        ("arn:aws-cn:sqs:cn-north-1:111122223333:events", "sqs:ReceiveMessage"),
        ("arn:aws-cn:sqs:cn-north-1:111122223333:events", "sqs:DeleteMessage"),
    }
    conditions = [
        statement.get("Condition", {}).get("StringLike", {}).get("s3:prefix")
        for statement in least_policy(source)["Statement"]
    ]
    assert [condition for condition in conditions if condition] == ["2024/*", "daily/photos/all/*"]


def test_a_prefix_is_no_pattern():
    policy = least_policy(settings_for("https://s3.amazonaws.com", "photos", prefix="a*?$/"))
    _, listing, objects = policy["Statement"]
    assert listing["Condition"] == {"StringLike": {"s3:prefix": "a${*}${?}${$}/*"}}
    assert objects["Resource"] == "arn:aws:s3:::photos/a${*}${?}${$}/*"
