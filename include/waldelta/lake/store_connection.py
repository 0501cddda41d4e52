"""What opens a lake's object store: from an Airflow connection or the environment, for delta-rs,
Arrow and Spark's JVM alike.

delta-rs's names of the options are used throughout; they begin with a store's ``variables``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from waldelta.config.airflow_connection import AirflowConnection, read_connection
from waldelta.config.stores import STORES, store_of
from waldelta.errors import ConfigError

_PREFIXES = tuple(store.variables for store in STORES.values())
_S3A = "spark.hadoop.fs.s3a"
_ASSUMED = "org.apache.hadoop.fs.s3a.auth.AssumedRoleCredentialProvider"
_ENVIRONMENT = "software.amazon.awssdk.auth.credentials.EnvironmentVariableCredentialsProvider"
_MACHINES_OWN = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
# A store that doesn't answer ends the run within two minutes: requests are repeated for
# retry_timeout, and the last one may wait for its own timeout.
REQUEST_LIMITS = {
    "max_retries": "10",
    "retry_timeout": "60s",
    "timeout": "30s",
    "connect_timeout": "5s",
}


def read_store_options(
    root: str, conn_id: str | None = None, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns the options of the object store that a lake's root is in; none for a local folder.

    They are those of the Airflow connection ``conn_id``, in ``AIRFLOW_CONN_<ID>``, else those of
    the environment, and REQUEST_LIMITS. Raises ConfigError for a connection that isn't there, can't
    be read, or is of a type that doesn't open this store.
    """
    scheme = urlsplit(root).scheme
    name = store_of(root)
    if scheme == "file" or (name is None and conn_id is None):
        return {}
    if conn_id is None:
        return REQUEST_LIMITS | {k: v for k, v in environment.items() if is_store_variable(k)}
    if name is None:
        raise ConfigError(f"target.conn_id: no type of connection is known for {scheme}://")
    connection = read_connection(conn_id, STORES[name].connections, f"{scheme}://", environment)
    options = _READERS[connection.conn_type](connection)
    return REQUEST_LIMITS | {key: str(value) for key, value in options.items() if value}


def is_store_variable(name: str) -> bool:
    """Returns whether delta-rs or Spark's JVM may read this variable to open a store."""
    return name.startswith(_PREFIXES)


def s3a_settings(options: Mapping[str, str]) -> dict[str, str]:
    """Returns Spark's settings by which Hadoop's S3A finds the same store, free of secrets.

    S3A reads keys and a session token from the environment of its process, by the same names.
    """
    settings = {
        f"{_S3A}.endpoint": options.get("AWS_ENDPOINT_URL"),
        f"{_S3A}.endpoint.region": options.get("AWS_REGION") or options.get("AWS_DEFAULT_REGION"),
    }
    if "AWS_ENDPOINT_URL" in options:
        is_virtual = options.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "false").lower() == "true"
        settings[f"{_S3A}.path.style.access"] = "false" if is_virtual else "true"
    if "AWS_IAM_ROLE_ARN" in options:
        settings |= {
            f"{_S3A}.assumed.role.arn": options["AWS_IAM_ROLE_ARN"],
            f"{_S3A}.aws.credentials.provider": _ASSUMED,
            f"{_S3A}.assumed.role.credentials.provider": (
                _ENVIRONMENT if "AWS_ACCESS_KEY_ID" in options else _MACHINES_OWN
            ),
        }
    return {name: value for name, value in settings.items() if value}


def _of_aws(connection: AirflowConnection) -> dict[str, Any]:
    extra = connection.extra
    service = _part(connection, "service_config", "s3")
    endpoint = service.get("endpoint_url") or extra.get("endpoint_url") or connection.host
    unsupported = ("profile_name", "external_id", "assume_role_method", "assume_role_kwargs")
    _refuse(connection, (*unsupported, "session_kwargs"))
    style = _part(connection, "config_kwargs", "s3").get("addressing_style")
    return {
        "AWS_ACCESS_KEY_ID": connection.login or extra.get("aws_access_key_id"),
        "AWS_SECRET_ACCESS_KEY": connection.password or extra.get("aws_secret_access_key"),
        "AWS_SESSION_TOKEN": extra.get("aws_session_token"),
        "AWS_REGION": service.get("region_name") or extra.get("region_name"),
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true" if str(endpoint).startswith("http://") else None,
        "AWS_IAM_ROLE_ARN": extra.get("role_arn"),
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true" if style == "virtual" else None,
    }


def _of_azure_storage(connection: AirflowConnection) -> dict[str, Any]:
    extra = connection.extra
    _refuse(connection, ("managed_identity_client_id", "workload_identity_tenant_id"))
    parts = dict(
        part.split("=", 1)
        for part in str(extra.get("connection_string") or "").split(";")
        if "=" in part
    )
    account = connection.login or extra.get("account_name") or parts.get("AccountName")
    if extra.get("tenant_id"):
        # If a tenant is given, login and password are those of a service principal.
        host = (connection.host or "").removeprefix("https://").split(".")[0]
        return _principal(connection) | {"AZURE_STORAGE_ACCOUNT_NAME": host or None}
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": account,
        "AZURE_STORAGE_ACCOUNT_KEY": connection.password or parts.get("AccountKey"),
        "AZURE_STORAGE_SAS_TOKEN": extra.get("sas_token") or parts.get("SharedAccessSignature"),
        "AZURE_STORAGE_ENDPOINT": parts.get("BlobEndpoint"),
    }


def _of_data_lake(connection: AirflowConnection) -> dict[str, Any]:
    return _principal(connection) | {"AZURE_STORAGE_ACCOUNT_NAME": connection.host}


def _principal(connection: AirflowConnection) -> dict[str, Any]:
    return {
        "AZURE_STORAGE_CLIENT_ID": connection.login,
        "AZURE_STORAGE_CLIENT_SECRET": connection.password,
        "AZURE_STORAGE_TENANT_ID": connection.extra.get("tenant_id"),
    }


def _of_google(connection: AirflowConnection) -> dict[str, Any]:
    extra = connection.extra
    key = extra.get("keyfile_dict")
    unsupported = ("key_secret_name", "credential_config_file", "impersonation_chain")
    # The names of earlier releases of the provider.
    _refuse(connection, (*unsupported, *(name for name in extra if name.startswith("extra__"))))
    return {
        "GOOGLE_SERVICE_ACCOUNT": extra.get("key_path"),
        "GOOGLE_SERVICE_ACCOUNT_KEY": key if isinstance(key, str) or not key else json.dumps(key),
    }


def _part(connection: AirflowConnection, *names: str) -> Mapping[str, Any]:
    """Returns a nested part of the extra, which may be written as JSON text; empty without it."""
    part: Any = connection.extra
    for name in names:
        part = part.get(name) or {}
        try:
            part = json.loads(part) if isinstance(part, str) else part
        except ValueError:
            part = None
        if not isinstance(part, Mapping):
            raise ConfigError(f"{connection.variable}: the extra's {name} isn't a JSON object")
    return dict(part)


def _refuse(connection: AirflowConnection, unsupported: tuple[str, ...]) -> None:
    """Raise ConfigError where an extra asks for credentials that delta-rs can't use.

    Ignored, other credentials would be used, perhaps with other rights.
    """
    if set_ := [name for name in unsupported if connection.extra.get(name)]:
        raise ConfigError(
            f"{connection.variable}: the extra sets {', '.join(set_)}, which the lake's readers and"
            " writers can't use: give the connection a key, a role or nothing (the machine's own"
            " identity)"
        )


# The reader of a connection, by the connection's type.
_READERS: Mapping[str, Callable[[AirflowConnection], dict[str, Any]]] = {
    "aws": _of_aws,
    "wasb": _of_azure_storage,
    "adls": _of_data_lake,
    "google_cloud_platform": _of_google,
}
