"""An Airflow connection for libpq: what is passed on, left to Airflow, or refused."""

import json
from urllib.parse import quote, urlencode

import pytest
from psycopg.conninfo import conninfo_to_dict

from waldelta.errors import ConfigError
from waldelta.postgres import describe
from waldelta.postgres.connection import conninfo_from_environment

SECRET = "5ecret"
FIELDS = {"host": "db", "port": "5432", "user": "u", "password": SECRET, "dbname": "d"}

PASSED = {
    "nothing": {},
    "verification": {"sslmode": "verify-full", "sslrootcert": "/c/root.crt", "sslcrl": "/c/crl",
                     "sslcrldir": "/c/crls"},
    "client certificate":
     {"sslcert": "/c/c.crt", "sslkey": "/c/c.key", "sslpassword": SECRET, "sslcertmode": "require"},
    "protocol of TLS": {"ssl_min_protocol_version": "TLSv1.3",
                        "ssl_max_protocol_version": "TLSv1.3", "sslsni": "0"},
    "the server's identity":
     {"requirepeer": "postgres", "require_auth": "scram-sha-256", "channel_binding": "require"},
    "kerberos": {"gssencmode": "require", "krbsrvname": "pg", "gsslib": "gssapi",
                 "gssdelegation": "1"},
    "the network": {"hostaddr": "10.0.0.1", "keepalives_idle": "5", "load_balance_hosts": "random"},
    "the session": {"options": "-c work_mem=64MB", "target_session_attrs": "read-write",
                    "connect_timeout": "3"},
}  # fmt: skip
# Airflow's and its hooks' own, and what is ours to say.
LEFT = {
    "airflow": {"iam": True, "redshift": False, "cursor": "dictcursor", "aws_conn_id": "aws",
                "cluster-identifier": "c"},
    "ours": {"application_name": "x", "fallback_application_name": "x", "client_encoding": "latin1",
             "replication": "true"},
    "fields of the connection":
     {"user": "other", "password": "other", "dbname": "other", "port": "1"},
}  # fmt: skip
REFUSED = {
    "misspelt": "sslrootcrt", "of another driver": "ssl_ca", "of JDBC": "sslfactory",
    "for debugging, and tells the keys": "sslkeylogfile", "of a later libpq": "sslfuture",
    "kerberos": "gss_encmode", "authentication": "require_authentication",
}  # fmt: skip


def as_json(extra):
    login = {"host": "db", "port": 5432, "login": "u", "password": SECRET, "schema": "d"}
    return json.dumps({"conn_type": "postgres", **login, "extra": extra})


def as_json_text(extra):
    return as_json(json.dumps(extra))


def as_query(extra):
    return f"postgres://u:{SECRET}@db:5432/d?{urlencode(extra)}"


def as_extra_of_uri(extra):
    return f"postgresql://u:{SECRET}@db:5432/d?__extra__={quote(json.dumps(extra))}"


FORMS = [as_json, as_json_text, as_query, as_extra_of_uri]


def fields(text):
    return conninfo_to_dict(conninfo_from_environment("it", {"AIRFLOW_CONN_IT": text}))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("extra", PASSED.values(), ids=PASSED)
def test_what_libpq_knows_is_passed_on(form, extra):
    """Every parameter: who sets one relies on it."""
    assert fields(form(extra)) == FIELDS | extra


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("extra", LEFT.values(), ids=LEFT)
def test_what_is_airflows_or_ours_stays_out(form, extra):
    assert fields(form(extra)) == FIELDS


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REFUSED.values(), ids=REFUSED)
def test_a_protection_that_nobody_would_give_is_refused(form, name):
    """By its name, without its value."""
    with pytest.raises(ConfigError, match=f"AIRFLOW_CONN_IT: .*{name}") as caught:
        fields(form({name: SECRET}))
    assert SECRET not in str(caught.value)


def test_a_connection_is_described_without_its_secrets():
    assert (
        describe(
            conninfo_from_environment(
                "it", {"AIRFLOW_CONN_IT": as_json(PASSED["client certificate"])}
            )
        )
        == "db:5432/d"
    )


OTHER_KINDS = {
    "a URI of another type": (f"mysql://u:{SECRET}@db/d", "has type 'mysql'"),
    "SQLAlchemy's": (f"postgresql+psycopg2://u:{SECRET}@db/d", "has type 'postgresql+psycopg2'"),
    "JSON of another type": (json.dumps({"conn_type": "mssql", "password": SECRET}),
     "has type 'mssql'"),
    "JSON without a type": (json.dumps({"host": "db", "password": SECRET}),
     "neither an Airflow connection URI nor"),
    "libpq's words": (f"host=db password={SECRET}", "neither an Airflow connection URI nor"),
    "no scheme": (f"u:{SECRET}@db/d", "neither an Airflow connection URI nor"),
}  # fmt: skip


@pytest.mark.parametrize("text, told", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_a_connection_of_another_type_is_named_by_it(text, told):
    with pytest.raises(ConfigError) as caught:
        conninfo_from_environment("shop", {"AIRFLOW_CONN_SHOP": text})
    assert told in str(caught.value)
    assert SECRET not in str(caught.value)
