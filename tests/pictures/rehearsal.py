"""``python -m tests.pictures.rehearsal docs/images``: README's picture of a rehearsal's report.

It is what a terminal shows, as SVG; the migration is run for it.
"""

import argparse
import io
import re
import textwrap
from pathlib import Path

from rich.console import Console
from rich.text import Text

from waldelta.config import PipelineFile
from waldelta.rehearsal.impact_kinds import FAILING
from waldelta.rehearsal.migration import statements
from waldelta.rehearsal.production import Production, TableSize
from waldelta.rehearsal.rehearsal import rehearse

SCHEMA = """
create role app;
create table customers(id bigint primary key, name text not null);
create table orders(id bigint primary key, total numeric(12,2), status text not null);
alter table orders replica identity full;
alter table customers owner to app; alter table orders owner to app;
"""
MIGRATION = """\
alter table customers add column age int;
create index on orders (status);
alter table orders alter column total type numeric(14,4);
alter table orders replica identity default;
"""
SIZES = {
    "public.customers": TableSize(90_000, 40 << 20),
    "public.orders": TableSize(24_000_000, 6 << 30),
}
_COLOURS = {"app-error": "bold red", "error": "bold red", "copy": "yellow", "lock": "yellow"}
_WIDTH = 104


def report_text() -> str:
    """The report of the migration above, as the command prints it."""
    tables = [{"name": "public.customers"}, {"name": "public.orders", "where": "status <> 'new'"}]
    publication = {"name": "shop", "tables": tables}
    source = {"conn_id": "shop", "slot": "shop_cdc", "publications": [publication]}
    document = {"pipeline": "shop", "source": source, "target": {"root": "file:///lake"}}
    production = Production(SCHEMA, "schema.sql", None, SIZES, wal_bytes_per_hour=3600 * (2 << 20))
    file = PipelineFile.model_validate(document)
    report = rehearse(file, production, statements(MIGRATION, "0042.sql"))
    return report.as_text(FAILING)


def main() -> None:
    """Run the migration and write the picture."""
    parser = argparse.ArgumentParser(prog="python -m tests.pictures.rehearsal", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the picture goes")
    folder = parser.parse_args().folder
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    for line in report_text().splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        text = Text("\n".join(textwrap.wrap(line, _WIDTH, subsequent_indent=indent)))
        for kind, colour in _COLOURS.items():
            text.highlight_regex(rf"^\s+{kind}:|(?<=: ){kind}$", colour)
        text.highlight_regex(r"safe way:", "green")
        console.print(text)
    picture = console.export_svg(title="waldelta rehearse shop.yml --migration 0042.sql")
    # A reader's browser would fetch the fonts from another server.
    plain = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    (folder / "rehearsal.svg").write_text(plain)


if __name__ == "__main__":
    main()
