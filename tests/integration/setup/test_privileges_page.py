"""docs/reference/privileges.md: roles with what the page grants run a whole pipeline."""

import re
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.oracles.target_rows import read_target
from tests.support.pipelines import new_pipeline
from tests.support.slot_state import lose
from waldelta.errors import PreflightFailed, PrivilegeMissing
from waldelta.jobs import Pipeline
from waldelta.jobs.decide import run_decide
from waldelta.pipeline.run_result import RunFailed
from waldelta.stages.land.idle_check import check_idle

pytestmark = pytest.mark.spark

PAGE = (Path(__file__).parents[3] / "docs/reference/privileges.md").read_text()
SETUP, READER, TEMPORARY, FUNCTIONS = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
# What whoever hardens a server takes from everybody at once, whichever of it the page names.
FAMILIES = (
    "^pg_(control_|export_|terminate_|log_standby|xact_status|stat_force|"
    ".*(wal|slot|snapshot|advisory|filenode)|.*_size$)"
)
HARDENED = f"""
do $$
declare
    named regprocedure;
begin
    for named in
        select oid
        from pg_proc
        where pronamespace = 'pg_catalog'::regnamespace and proname ~ '{FAMILIES}'
    loop
        execute format('revoke execute on function %s from public', named);
    end loop;
end $$
"""
# What the page grants, each as check asks for it when it was taken away.
GRANTED = (
    "grant connect on database shop to lake_setup",
    "grant create on database shop to lake_setup",
    "alter role lake_setup replication",
    "grant temporary on database shop to lake_setup",
    "grant connect on database shop to lake_reader",
    "alter role lake_reader replication",
    "grant usage on schema sales to lake_reader",
    "grant select on sales.orders to lake_reader",
    "grant temporary on database shop to lake_reader",
)
TAKEN_AWAY = [
    (
        re.sub(r"^grant (.*) to ", r"revoke \1 from ", says).replace(
            " replication", " noreplication"
        ),
        says,
    )
    for says in GRANTED
]
LOOKED_BY = (
    "pg_logical_slot_peek_binary_changes(name, pg_lsn, integer, text[])",
    "pg_try_advisory_lock(bigint)",
    "pg_control_checkpoint()",
    "pg_control_system()",
    "pg_get_replication_slots()",
    "pg_current_wal_flush_lsn()",
    "pg_walfile_name(pg_lsn)",
    "pg_current_snapshot()",
)
YEARS = [datetime(year, 1, 1, tzinfo=UTC) for year in (2020, 2021)]
# Granted for what doesn't happen here.
ONLY_THEN = {
    ("lake_setup", "pg_stat_clear_snapshot"),  # a table is locked
    # The slot stands behind what has landed, or nothing was for us.
    ("lake_reader", "pg_replication_slot_advance"),
    ("lake_reader", "pg_terminate_backend"),  # a killed run's backend still reads the slot
    ("lake_reader", "pg_xact_status"),  # a prepared transaction was rolled back while decoded
    ("lake_setup", "pg_current_wal_insert_lsn"),  # the slot is a standby's
}
# A copy takes long enough to say how far it is, or a table is locked.
AT_TIMES = {("lake_reader", "pg_stat_clear_snapshot")}
PASSWORD, PAID = "Xy-42", "state = 'paid'"
TABLES = """
create schema sales authorization shop_owner;
set role shop_owner;
create table sales.orders (id int primary key, state text not null, note text);
create table sales.customers (id int primary key, name text);
alter table sales.orders replica identity full;
insert into sales.orders select n, case when n % 2 = 0 then 'open' else 'paid' end, 'n' || n
  from generate_series(1, 20) n;
insert into sales.customers select n, 'c' || n from generate_series(1, 5) n;
reset role;
"""
OPEN_TO_ALL = """
select p.proname
from pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
where p.proname = any(%s) and a.grantee = 0
"""


class Shop:
    """The page's database, roles and pipeline, under names of this test's own."""

    def __init__(self, database, lake, monkeypatch):
        self.database, self.lake, self.monkeypatch = database, lake, monkeypatch

    def named(self, text: str) -> str:
        own = self.database.name
        text = re.sub(
            r"\b(lake_setup|lake_reader|shop_owner)\b", rf"\1_{own}", text.replace("…", PASSWORD)
        )
        return re.sub(r"\bshop\b", own, text)

    def run(self, text: str) -> None:
        if self.database.connection.info.server_version < 170000:
            text = text.replace(
                "(name, name, boolean, boolean, boolean)", "(name, name, boolean, boolean)"
            )
        self.database.execute(self.named(text))

    def pipeline(self, role: str, where: str = "state = 'open'") -> Pipeline:
        """The pipeline, connected as this role of the page's."""
        uri = self.database.server.uri(self.database.name, self.named(role), PASSWORD)
        self.monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", uri)
        tables = [{"name": "sales.orders", "where": where}, "sales.customers"]
        target = {"root": self.lake, "tables": {"sales.customers": {"where": "id > 1"}}}
        return new_pipeline(self.database, self.lake, tables, target=target)

    @contextmanager
    def without(self, revoke: str):
        """A privilege is taken away for a while."""
        self.run(revoke)
        yield
        back = revoke.replace("noreplication", "replication")
        self.run(re.sub(r"^revoke (.*) from ", r"grant \1 to ", back))

    def unused(self) -> list[tuple[str, str]]:
        """What the page grants by name and the role has never called."""
        log = (self.database.server.data / "server.log").read_text(errors="replace")
        said = dict.fromkeys(("lake_setup", "lake_reader"), "")
        for user, text in re.findall(r"^@(\w+)@ (.*?)(?=^@|\Z)", log, re.DOTALL | re.MULTILINE):
            for role in said:
                said[role] += text if user == self.named(role) else ""
        granted = re.findall(r"function\n(.*?)\nto ([\w, ]+);", FUNCTIONS, re.DOTALL)
        return [
            (role, name)
            for names, roles in granted
            for role in roles.split(", ")
            for name in re.findall(r"^    (\w+)\(", names, re.MULTILINE)
            if not re.search(rf'{name}"?\({self._views(name)}', said[role])
        ]

    def _views(self, name: str) -> str:
        """As alternatives: the server's views that call a function, as whoever asks them."""
        query = (
            "select viewname from pg_views where schemaname = 'pg_catalog' and definition ~ %s"
            " order by 1"
        )
        return "".join(
            rf"|\b{view}\b" for (view,) in self.database.execute(query, (rf"\m{name}\(",))
        )


@pytest.fixture
def logged(database):
    """The server's log tells whose each statement was."""
    database.execute("alter system set log_line_prefix = '@%u@ '")
    database.execute("select pg_reload_conf()")
    yield
    database.execute("alter system reset log_line_prefix")
    database.execute("select pg_reload_conf()")


@pytest.fixture
def shop(database, lake, monkeypatch, logged):
    """A server that grants nothing to everybody, neither on databases nor on functions."""
    shop = Shop(database, lake, monkeypatch)
    roles = [shop.named(role) for role in ("lake_setup", "lake_reader", "shop_owner")]
    try:
        shop.run("create role shop_owner nologin")
        shop.run(TABLES)
        shop.run("revoke all on database shop from public; revoke all on schema public from public")
        shop.run(HARDENED)
        named = re.findall(r"^    (\w+)\(", FUNCTIONS, re.MULTILINE)
        assert database.execute(OPEN_TO_ALL, (named,)) == [], (
            "the families must have all that the page names"
        )
        yield shop
    finally:
        for role in roles:
            if database.execute("select 1 from pg_roles where rolname = %s", (role,)):
                database.execute(f"drop owned by {role} cascade; drop role {role}")


def missing(shop, role, where="state = 'open'"):
    """What check says, as text: as findings, or as its own failure."""
    try:
        return "\n".join(shop.pipeline(role, where).check().problems)
    except PrivilegeMissing as err:
        return str(err)


def held(runner, pipeline, table):
    return {row["id"] for row in (read_target(pipeline.target_path(table), "id"))}


def set_up(shop):
    """By the role for it. The reader is refused before, and has nothing to do after."""
    with pytest.raises(PreflightFailed, match=r"publication .* must be created"):
        shop.pipeline("lake_reader").setup()
    assert shop.database.execute("select 1 from pg_publication") == []
    shop.pipeline("lake_setup").setup()
    assert shop.pipeline("lake_reader").setup().is_empty


def test_no_role_is_asked_to_own_tables(shop):
    """Whichever role runs check may be the reader. Its statements would own what they only read."""
    for text in (SETUP, READER, TEMPORARY, FUNCTIONS):
        shop.run(text)
    with shop.without("revoke shop_owner from lake_setup"):
        for role in ("lake_setup", "lake_reader"):
            lacks = missing(shop, role)
            assert "the role doesn't own sales." in lacks
            assert "run setup as a role that only sets up" in lacks
            assert shop.named("grant shop_owner") not in lacks


@pytest.mark.nightly("every statement of a page; test_init has the role's own")
def test_the_page(runner, shop):
    """Check names each grant that is taken away; each granted function is called."""
    shop.run(SETUP)
    shop.run(READER)
    shop.run(TEMPORARY)
    shop.run(FUNCTIONS)
    shop.run(
        "alter role lake_setup set log_statement = 'all'; alter role lake_reader set log_statement"
        " = 'all'"
    )
    for revoke, says in TAKEN_AWAY:
        role = re.search(r"lake_\w+", revoke)[0]
        if role == "lake_setup":
            with shop.without(revoke):
                assert shop.named(says) in missing(shop, role)
    assert missing(shop, "lake_setup") == ""
    set_up(shop)
    shop.pipeline("lake_reader").sync(runner)
    # A filter changed by setup is mended by the reader's run; other changes come by the stream.
    shop.pipeline("lake_setup", PAID).setup()
    shop.run("alter role lake_setup nologin")
    shop.database.execute(
        "insert into sales.orders values (21, 'paid'), (22, 'open'); delete from sales.customers"
        " where id = 2"
    )
    mended = shop.pipeline("lake_reader", PAID)
    assert mended.consume(runner).status == "succeeded"
    paid = set(range(1, 22, 2))
    assert held(runner, mended, "sales.orders") == paid
    assert held(runner, mended, "sales.customers") == {3, 4, 5}
    assert mended.status()["targets"]["sales.orders"]["action"] == "apply"
    assert mended.validate(runner).status == "succeeded"
    assert mended.replay(runner, YEARS[0], YEARS[1]).status == "succeeded"
    assert run_decide(runner, mended.job(), "retry").status == "succeeded"
    assert mended.maintain(runner).status == "succeeded"

    assert missing(shop, "lake_reader", PAID) == ""
    for revoke, says in TAKEN_AWAY:
        if "lake_reader" in revoke:
            with shop.without(revoke):
                assert shop.named(says) in missing(shop, "lake_reader", PAID)
    shop.database.execute("insert into sales.orders values (23, 'paid')")
    before = mended.job().ledger.slot_moves()
    for revoke in (
        "alter role lake_reader noreplication",
        *(f"revoke execute on function {name} from lake_reader" for name in LOOKED_BY),
    ):
        with (
            shop.without(revoke),
            pytest.raises(
                PrivilegeMissing, match=r"permission denied .*Privileges on the source"
            ) as refused,
        ):
            check_idle(mended.job())
        if "noreplication" in revoke:
            assert shop.named("alter role lake_reader replication; ") in str(refused.value)
    assert mended.job().ledger.slot_moves() == before
    with (
        shop.without("revoke select on sales.orders from lake_reader"),
        pytest.raises(
            RunFailed,
            match=r"PrivilegeMissing: sales\.orders can't be copied .*: grant select on it",
        ),
    ):
        mended.sync(runner, tables=["sales.orders"])
    assert held(runner, mended, "sales.orders") == paid

    # A slot that can't be used any more is not dropped by a role that can't make another.
    lose(shop.database)
    with pytest.raises(RunFailed, match="may not execute pg_create_logical_replication_slot"):
        mended.resync(runner)
    assert shop.database.execute(
        "select 1 from pg_replication_slots where slot_name = %s", (mended.file.source.slot,)
    )
    shop.run("alter role lake_setup login")
    shop.pipeline("lake_setup", PAID).teardown()
    assert shop.database.execute("select 1 from pg_publication") == []
    assert set(shop.unused()) - AT_TIMES == ONLY_THEN
