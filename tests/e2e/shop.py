"""A small pipeline on the running stack, for the tests of its DAGs."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from deltalake import DeltaTable

from demo.airflow_client import AirflowClient, DagRun
from demo.stack import Stack

PIPELINE = """\
pipeline: {name}
source:
  conn_id: {name}_source
  slot: {name}_cdc
  publications:
    - name: {name}_pub
      tables:
        - {{name: public.orders, where: status <> 'draft'}}
        - {{name: public.customers}}
        {more}
target: {{root: "{root}", copy_within_run_mb: 0}}
spark_conn_id: {spark}
schedule: null
maintenance: {{schedule: null}}
quality: {{suites: "{suites}"}}
notify:
  - {{errors: [SourceError], notifier: {notifier}, arguments: {{to: dba@example.org, {mail}}}}}
  - {{errors: [QualityFailed], notifier: {notifier}, arguments: {{to: team@example.org, {mail}}}}}
"""
NOTIFIER = "airflow.providers.smtp.notifications.smtp.SmtpNotifier"
MAIL = """\
from_email: airflow@example.org, smtp_conn_id: mail, \
subject: "{{ failure.pipeline }} {{ failure.error_class }}", \
html_content: "{{ failure.message | e }} ({{ failure.remedy | e }})"\
"""
TABLES = """\
create table customers (id int primary key, name text);
create table orders (id int primary key, customer int, status text not null, note text);
alter table orders replica identity full;
insert into customers select n, 'customer ' || n from generate_series(1, 10) n;
insert into orders select n, n % 10 + 1, case when n % 2 = 0 then 'paid' else 'draft' end
  from generate_series(1, 100) n;
"""
CDC = ["slot_has_changes", "land", "apply", "check", "report"]
NOT_NEEDED = {"fail_the_run": "skipped"}
NO_COPY = {"copy_again": "skipped"} | NOT_NEEDED


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder outside of pytest's, which other sessions close to PostgreSQL's user."""
    folder = Path(tempfile.mkdtemp(prefix="waldelta_stack_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def have_parsed(stack: Stack) -> None:
    """Have Airflow read the pipeline files at once: it does when the DAG file that reads them has
    changed.

    Not when it was reading it just then; the next time comes before anybody's patience ends.
    """
    for file in stack.dags.glob("waldelta_*.py"):
        file.touch()


@dataclass
class Shop:
    """A pipeline that is set up and copied."""

    name: str
    stack: Stack
    client: AirflowClient
    source: psycopg.Connection
    root: str
    suites: Path
    runs: list[DagRun] = field(default_factory=list)

    def run(self, kind: str, **conf) -> DagRun:
        run = self.client.run_to_end(f"{self.name}_{kind}", conf, timeout_s=600)
        self.runs.append(run)
        return run

    def target(self, table: str, *columns: str) -> list[tuple]:
        rows = (
            DeltaTable(f"{self.root}/public/{table}")
            .to_pyarrow_table(columns=list(columns))
            .to_pylist()
        )
        return sorted(tuple(row.values()) for row in rows)

    def wanted(self, query: str) -> list[tuple]:
        return sorted(self.source.execute(query).fetchall())

    def is_equal(self) -> bool:
        orders = self.wanted(
            "select id, customer, status, note from orders where status <> 'draft'"
        )
        customers = self.wanted("select id, name from customers")
        return self.target("orders", "id", "customer", "status", "note") == orders and (
            self.target("customers", "id", "name") == customers
        )


def make_shop(stack: Stack, name: str, spark: str, more: str = "", sql: str = "") -> Iterator[Shop]:
    """The pipeline ``name``, set up and copied, with ``more`` tables that ``sql`` makes."""
    stack.add_source(f"{name}_source", name)
    root = f"{stack.lake}/{name}"
    suites = stack.folder / "suites" / name
    suites.mkdir(parents=True)
    (stack.pipelines / f"{name}.yml").write_text(
        PIPELINE.format(
            name=name, root=root, spark=spark, suites=suites, notifier=NOTIFIER, mail=MAIL,
            more=more,
        )
    )  # fmt: skip
    have_parsed(stack)
    stack.create_pools()
    with (
        stack.client() as client,
        psycopg.connect(stack.source_conninfo(f"{name}_source"), autocommit=True) as source,
    ):
        source.execute(TABLES + sql)
        dag_ids = [f"{name}_{kind}" for kind in ("setup", "initial_sync", "cdc", "maintenance")]
        client.wait_for_dags(dag_ids)
        for dag_id in dag_ids:
            client.unpause(dag_id)
        made = Shop(name, stack, client, source, root, suites)
        made.run("setup")
        made.run("initial_sync")
        yield made


def change(shop: Shop) -> None:
    """Gives orders two rows and takes two, by the filter too; customers stay."""
    with shop.source.transaction():
        (chosen,) = shop.source.execute(
            "select min(id) filter (where status = 'draft'), min(id) filter (where status = 'paid')"
            " from orders"
        ).fetchall()
        shop.source.execute(
            "insert into orders select coalesce(max(id), 0) + 1, 1, 'paid', 'new' from orders"
        )
        shop.source.execute("update orders set status = 'paid' where id = %s", chosen[:1])
        shop.source.execute("update orders set status = 'draft' where id = %s", chosen[1:])
        shop.source.execute(
            "delete from orders where id = (select max(id) from orders where status = 'paid' and id"
            " < 90)"
        )


def clear(shop: Shop, run: DagRun) -> DagRun:
    shop.client.post(f"/dags/{run.dag_id}/dagRuns/{run.run_id}/clear", {"dry_run": False})
    return shop.client.wait(run.dag_id, run.run_id)
