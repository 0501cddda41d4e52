"""TLS through the Airflow connection's extra: verify-full and a client certificate."""

import json
import shutil
from pathlib import Path

import pytest

from tests.oracles.target_rows import read_target
from tests.support.fixtures.postgres import INSTALLED, new_postgres
from tests.support.pipelines import bare_slot, pipeline_file
from tests.support.servers.tls import Authority, tls_before
from waldelta.errors import AuthenticationFailed, ConfigError, SourceUnreachable
from waldelta.jobs.consume import consume
from waldelta.pipeline.job import load_job
from waldelta.postgres import connect
from waldelta.postgres.connection import connect_arrow, conninfo_from_environment
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres
from waldelta.stages.sync.sync import sync

pytestmark = pytest.mark.pg


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


def airflow_connection(server: EmbeddedPostgres, port: int, **extra: str) -> str:
    """Airflow's JSON form of a connection, as AIRFLOW_CONN_… holds it."""
    return json.dumps(
        {
            "conn_type": "postgres",
            "host": "localhost",
            "port": port,
            "login": "postgres",
            "password": server.password,
            "schema": "postgres",
            "extra": {"sslmode": "verify-full", **extra},
        }
    )


def certificates(authority: Authority, user: str = "postgres") -> dict[str, str]:
    certificate, key = authority.issue(f"client_{user}", user)
    return {"sslrootcert": str(authority.root), "sslcert": str(certificate), "sslkey": str(key)}


def conninfo(server, port, **extra) -> str:
    return conninfo_from_environment(
        "it", {"AIRFLOW_CONN_IT": airflow_connection(server, port, **extra)}
    )


@pytest.mark.parametrize("open_connection", [connect, connect_arrow], ids=["psycopg", "adbc"])
def test_each_cause_has_its_error(postgres, authority, tmp_path, open_connection):
    """By both drivers; a verified connection reads, and none of the messages holds the password."""
    ours, foreign = certificates(authority), Authority(tmp_path / "foreign")
    with tls_before(postgres.port, authority) as port:
        with open_connection(conninfo(postgres, port, **ours), "test") as connection:
            cursor = connection.cursor()
            cursor.execute("select 1")
            assert cursor.fetchone() == (1,)
        refused = {
            "a foreign authority":
             (ours | {"sslrootcert": str(foreign.root)}, ConfigError, "certificate isn't trusted"),
            "no client certificate":
             ({"sslrootcert": ours["sslrootcert"]}, ConfigError, "client certificate"),
            "a client certificate of another":
             (certificates(foreign) | {"sslrootcert": ours["sslrootcert"]}, ConfigError,
              "client certificate"),
        }  # fmt: skip
        for name, (extra, error, told) in refused.items():
            with pytest.raises((ConfigError, AuthenticationFailed, SourceUnreachable)) as caught:
                open_connection(conninfo(postgres, port, **extra), "test")
            assert type(caught.value) is error, (name, str(caught.value))
            assert told in str(caught.value), name
            assert postgres.password not in str(caught.value)
    with (
        tls_before(postgres.port, authority, "elsewhere.example") as port,
        pytest.raises(ConfigError, match="localhost"),
    ):
        open_connection(conninfo(postgres, port, **ours), "test")


def test_a_pipeline_over_tls(runner, database, lake, authority, monkeypatch):
    """Copy and stream, each by its own driver and from Spark's tasks."""
    database.execute("create table t(id int primary key); insert into t values (1)")
    document = pipeline_file(lake, f"s_{database.name}")
    bare_slot(database, document)
    with tls_before(database.server.port, authority) as port:
        given = json.loads(airflow_connection(database.server, port, **certificates(authority)))
        monkeypatch.setenv(
            "AIRFLOW_CONN_TEST_SOURCE", json.dumps(given | {"schema": database.name})
        )
        job = load_job(document)
        assert f"port={port}" in job.source.conninfo
        sync(runner, job)
        database.execute("insert into t values (2)")
        consume(runner, job)
        assert len(read_target(job.lake.target("public.t").uri)) == 2


@pytest.mark.skipif(
    not INSTALLED, reason="the embedded server has no TLS of its own; Debian's packages have"
)
def test_a_server_that_asks_for_certificates(authority):
    """No password at all: hostssl with cert, where the certificate's name must be the user's."""
    server = new_postgres(INSTALLED[0], {"fsync": "off"})
    try:
        server.start()
        server.stop()
        for source, name in zip(
            (*authority.issue("postgres_server", "localhost"), authority.root), _FILES, strict=True
        ):
            owned = Path(shutil.copy(source, server.data / name))
            owned.chmod(0o600)
            shutil.chown(owned, server.data.owner(), server.data.group())
        names = dict(zip(("ssl_cert_file", "ssl_key_file", "ssl_ca_file"), _FILES, strict=True))
        with (server.data / "postgresql.conf").open("a") as conf:
            conf.writelines(
                f"{name} = '{value}'\n" for name, value in {"ssl": "on", **names}.items()
            )
        (server.data / "pg_hba.conf").write_text("local all all trust\nhostssl all all all cert\n")
        server.start()
        with connect(
            conninfo(server, server.port, **certificates(authority)), "test"
        ) as connection:
            used = connection.execute(
                "select ssl, client_dn from pg_stat_ssl where pid = pg_backend_pid()"
            ).fetchone()
            assert used == (True, "/CN=postgres")
        with pytest.raises(AuthenticationFailed):
            connect(conninfo(server, server.port, **certificates(authority, "somebody")), "test")
    finally:
        server.delete()


_FILES = ("test.crt", "test.key", "test_root.crt")
