"""Which options open a lake's store: from the environment, or from an Airflow connection."""

import json

import pytest

from waldelta.errors import ConfigError
from waldelta.lake import REQUEST_LIMITS, read_store_options
from waldelta.lake.store_connection import s3a_settings

S3, AZURE, GOOGLE = "s3a://b/lake", "abfss://c@acc.dfs.core.windows.net/lake", "gs://b/lake"
KEY = {"type": "service_account", "private_key": "k"}


def options(root, connection):
    text = connection if isinstance(connection, str) else json.dumps(connection)
    return own(read_store_options(root, "the_lake", {"AIRFLOW_CONN_THE_LAKE": text}))


def own(found):
    """The options without how long a store is waited for, which all have."""
    assert REQUEST_LIMITS.items() <= found.items()
    return {name: value for name, value in found.items() if name not in REQUEST_LIMITS}


def assumed(base):
    """The settings of a role that ``base`` of the SDK's credentials assumes."""
    return {
        "assumed.role.arn": "arn",
        "aws.credentials.provider": "org.apache.hadoop.fs.s3a.auth.AssumedRoleCredentialProvider",
        "assumed.role.credentials.provider": f"software.amazon.awssdk.auth.credentials.{base}",
    }


def test_without_a_connection_the_environment_opens_the_store():
    environment = {"AWS_REGION": "r", "AZURE_STORAGE_ACCOUNT_NAME": "a", "PATH": "/bin"}
    found = own(read_store_options(S3, None, environment))
    assert found == {"AWS_REGION": "r", "AZURE_STORAGE_ACCOUNT_NAME": "a"}
    assert read_store_options("file:///lake", None, environment) == {}


def aws(extra=None, **fields):
    return {"conn_type": "aws", **fields, "extra": extra or {}}


SECRETS = {"login": "key", "password": "secret"}
OPENED = [
    (S3, "aws://key:se%2Fcret@/?region_name=eu-central-1",
     {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "se/cret", "REGION": "eu-central-1"}),
    (S3, aws({"endpoint_url": "http://127.0.0.1:9", "aws_session_token": "t"}, **SECRETS),
     {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "SESSION_TOKEN": "t",
      "ENDPOINT_URL": "http://127.0.0.1:9", "ALLOW_HTTP": "true"}),
    (S3, aws(json.dumps({"role_arn": "arn:aws:iam::1:role/r",
                         "service_config": {"s3": {"endpoint_url": "https://s3.example"}},
                         "config_kwargs": {"s3": {"addressing_style": "virtual"}}})),
     {"IAM_ROLE_ARN": "arn:aws:iam::1:role/r", "ENDPOINT_URL": "https://s3.example",
      "VIRTUAL_HOSTED_STYLE_REQUEST": "true"}),
    (AZURE, "wasb://acc:k%3D@", {"ACCOUNT_NAME": "acc", "ACCOUNT_KEY": "k="}),
    (AZURE, {"conn_type": "wasb", "extra": {
        "connection_string": "AccountName=acc;AccountKey=k==;BlobEndpoint=http://x"}},
     {"ACCOUNT_NAME": "acc", "ACCOUNT_KEY": "k==", "ENDPOINT": "http://x"}),
    (AZURE, {"conn_type": "adls", "host": "acc", "login": "client", "password": "secret",
             "extra": {"tenant_id": "t"}},
     {"ACCOUNT_NAME": "acc", "CLIENT_ID": "client", "CLIENT_SECRET": "secret", "TENANT_ID": "t"}),
    (GOOGLE, {"conn_type": "google_cloud_platform", "extra": {"keyfile_dict": KEY}},
     {"SERVICE_ACCOUNT_KEY": json.dumps(KEY)}),
    (GOOGLE, "google-cloud-platform://?key_path=/k.json", {"SERVICE_ACCOUNT": "/k.json"}),
    (GOOGLE, "google-cloud-platform://", {}),
]  # fmt: skip
PREFIX = {S3: "AWS", AZURE: "AZURE_STORAGE", GOOGLE: "GOOGLE"}


@pytest.mark.parametrize("root, connection, expected", OPENED)
def test_a_connection_stands_for_delta_rs_options(root, connection, expected):
    assert options(root, connection) == {
        f"{PREFIX[root]}_{name}": value for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("root", "connection", "message"),
    [
        (S3, "wasb://a:k@", "has type 'wasb', which doesn't open s3a://.* type aws"),
        (AZURE, "aws://k:s@", "doesn't open abfss://.* type wasb or adls"),
        (S3, "key:secret", "neither an Airflow connection URI nor its JSON form"),
        (S3, "aws://k:s@/?profile_name=p", "profile_name, which the lake's"),
        (S3, {"conn_type": "aws", "extra": {"config_kwargs": "s3"}}, "config_kwargs isn't a JSON"),
        (S3, {"conn_type": "aws", "extra": {"assume_role_kwargs": {"a": 1}}}, "assume_role_kwargs"),
        (S3, {"conn_type": "aws", "extra": "[1]"}, "neither an Airflow connection URI nor"),
        (GOOGLE, "google-cloud-platform://?extra__google_cloud_platform__key_path=/k", "extra__"),
        ("hdfs://h/x", "aws://k:s@", "no type of connection is known for hdfs://"),
    ],
)
def test_what_opens_nothing_is_refused_without_the_secret(root, connection, message):
    with pytest.raises(ConfigError, match=message) as caught:
        options(root, connection)
    assert "secret" not in str(caught.value)


def test_a_missing_connection_says_how_to_give_it():
    with pytest.raises(ConfigError, match="set AIRFLOW_CONN_THE_LAKE to aws://KEY:SECRET@"):
        read_store_options(S3, "the_lake", {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"AWS_SECRET_ACCESS_KEY": "hidden", "AWS_ACCESS_KEY_ID": "k", "AWS_REGION": "r"},
         {"endpoint.region": "r"}),
        ({"AWS_ENDPOINT_URL": "http://h:1", "AWS_DEFAULT_REGION": "r"},
         {"endpoint": "http://h:1", "endpoint.region": "r", "path.style.access": "true"}),
        ({"AWS_ENDPOINT_URL": "https://h", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
         {"endpoint": "https://h", "path.style.access": "false"}),
        ({"AWS_IAM_ROLE_ARN": "arn"}, assumed("DefaultCredentialsProvider")),
        ({"AWS_IAM_ROLE_ARN": "arn", "AWS_ACCESS_KEY_ID": "k"},
         assumed("EnvironmentVariableCredentialsProvider")),
    ],
)  # fmt: skip
def test_spark_finds_the_same_store_and_is_told_no_secret(given, expected):
    found = s3a_settings(given)
    assert found == {f"spark.hadoop.fs.s3a.{name}": value for name, value in expected.items()}
    assert "hidden" not in str(found)
