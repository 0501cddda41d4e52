"""Migrations as Alembic and Django print them are rehearsed as they stand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from textwrap import dedent

import pytest
import yaml

from waldelta.cli.command_line import main

ALEMBIC = {
    "alembic.ini": "[alembic]\nscript_location = .\npath_separator = os\n",
    "env.py": """
        from alembic import context
        context.configure(dialect_name="postgresql", literal_binds=True, output_buffer=None)
        with context.begin_transaction():
            context.run_migrations()
    """,
    "versions/one.py": """
        revision, down_revision = "one", None
        def upgrade(): pass
    """,
    "versions/two.py": """
        import sqlalchemy as sa
        from alembic import op
        revision, down_revision = "two", "one"
        def upgrade():
            op.add_column("orders", sa.Column("note", sa.Text(), server_default="it's; new"))
            op.execute("update orders set note = 'old' where id < 3")
    """,
}
DJANGO = {
    "settings.py": """
        import os
        from psycopg.conninfo import conninfo_to_dict
        known = conninfo_to_dict(os.environ["SOURCE"])
        DATABASES = {"default": {
            "ENGINE": "django.db.backends.postgresql", "NAME": known["dbname"],
            "USER": known["user"], "PASSWORD": known["password"],
            "HOST": known["host"], "PORT": known["port"],
        }}
        INSTALLED_APPS = ["shop"]
    """,
    "shop/__init__.py": "",
    "shop/migrations/__init__.py": "",
    "shop/migrations/0001_initial.py": """
        from django.db import migrations, models
        class Migration(migrations.Migration):
            operations = [migrations.CreateModel(
                "Order", [("id", models.BigAutoField(primary_key=True))],
                options={"db_table": "orders"})]
    """,
    "shop/migrations/0002_note.py": """
        from django.db import migrations, models
        class Migration(migrations.Migration):
            dependencies = [("shop", "0001_initial")]
            operations = [
                migrations.AddField("order", "note", models.TextField(default="it's; new")),
                migrations.RunSQL("update orders set note = 'old' where id < 3")]
    """,
}
TOOLS = {
    "alembic": (ALEMBIC, ("alembic", "upgrade", "one:head", "--sql")),
    "django": (DJANGO, ("django", "sqlmigrate", "shop", "0002", "--settings=settings")),
}
SCHEMA = """
create table orders(id bigint primary key);
create table alembic_version(version_num varchar(32) primary key);
"""


def printed(folder, files, command, conninfo):
    """The migration as a tool of this machine prints it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    environment = os.environ | {"SOURCE": conninfo, "PYTHONPATH": str(folder)}
    process = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout


@pytest.mark.nightly("the migrations of two tools, which are SQL like any")
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tools_migration_is_rehearsed(tool, database, tmp_path, capsys):
    """It is one transaction, and the default of existing rows follows without a copy."""
    files, command = TOOLS[tool]
    sql = printed(tmp_path / "project", files, command, database.conninfo)
    migration, schema, pipeline = (tmp_path / name for name in ("m.sql", "s.sql", "shop.yml"))
    migration.write_text(sql)
    schema.write_text(SCHEMA)
    publication = {"name": "shop", "tables": [{"name": "public.orders"}]}
    source = {"conn_id": "prod", "slot": "shop_cdc", "publications": [publication]}
    target = {"root": "file:///lake"}
    document = {"pipeline": "shop", "source": source, "target": target}
    pipeline.write_text(yaml.safe_dump(document))
    options = ("--migration", str(migration), "--schema", str(schema), "--json")
    assert main(["rehearse", str(pipeline), *options]) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    impacts = [(one["kind"], one["text"]) for one in step["impacts"] if one["kind"] != "note"]
    assert impacts == [("readers", "added: note")]
    assert [text.split()[0].lower() for text in (step["sql"][0], step["sql"][-1])] == [
        "begin",
        "commit",
    ]
