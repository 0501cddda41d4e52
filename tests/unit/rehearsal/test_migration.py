"""Files of SQL are divided into statements as PostgreSQL would divide them."""

from __future__ import annotations

import pytest

from waldelta.errors import ConfigError
from waldelta.rehearsal.migration import read_migrations, statements

BODY = (
    "create function f() returns int begin atomic select 1; select case when true then 2 end; end"
)
DIVIDED = {
    "comments before, between and within": (
        "-- a; b\nselect 1; /* x; /* y; */ z; */\nselect /* ; */ 2;",
        [(2, "select 1"), (3, "select /* ; */ 2")],
    ),
    "the last one without a semicolon": (
        "select 1;\n\nselect 2\n",
        [(1, "select 1"), (3, "select 2")],
    ),
    "empty statements": (";;\n;select 1;;", [(2, "select 1")]),
    "semicolons in quotes": (
        "select ';', E'it\\'s;', \"a;b\", $$;$$, $t$;$$;$t$; select 2",
        [(1, "select ';', E'it\\'s;', \"a;b\", $$;$$, $t$;$$;$t$"), (1, "select 2")],
    ),
    "a backslash at the end of a standard string": (
        "select '\\'; select 2",
        [(1, "select '\\'"), (1, "select 2")],
    ),
    "a body of standard SQL": (f"{BODY}; select 3", [(1, BODY), (1, "select 3")]),
    "a rule of several statements": (
        "create rule r as on insert to t do also (select 1; select 2); select 3",
        [(1, "create rule r as on insert to t do also (select 1; select 2)"), (1, "select 3")],
    ),
    "a transaction": ("begin;\ncommit", [(1, "begin"), (2, "commit")]),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_statements(name):
    text, expected = DIVIDED[name]
    assert [(one.line, one.text) for one in statements(text, "m.sql")] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("select 1;\n\\i other.sql\n", r"m\.sql:2: \\i other.sql is a command of psql"),
        ("select 1;\n\nCOPY t FROM STDIN;\n1\n\\.\n", r"m\.sql:3: the rows of COPY FROM stdin"),
        ("copy t from stdin (format csv)", r"m\.sql:1: the rows of COPY FROM stdin"),
        ("copy (select 1) to stdout", r"m\.sql:1: the rows of COPY FROM stdin"),
        ("select 1 \\gexec\nselect 2", r"m\.sql:1: \\gexec is a command of psql"),
        ("select 'a", r"m\.sql:1: a quote, comment or dollar quote that begins here has no end"),
        ("select '\n';\ndo $x$ begin\n end; $y$;\nselect 1;", r"m\.sql:3: a quote, comment or"),
        ("select 1;\n\n/* \n select", r"m\.sql:3: a quote, comment"),
    ],
)
def test_what_only_psql_reads_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        statements(text, "m.sql")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"select 1;\nselect '\xe4';", r":2: the file isn't UTF-8"),
        (b"-- nothing\n", "has no SQL statement"),
        (None, "can't be read: No such file"),
    ],
)
def test_a_file_that_has_no_statements_is_named(tmp_path, content, message):
    path = tmp_path / "m.sql"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_migrations([path])


def test_files_follow_each_other(tmp_path):
    for name, text in (("b.sql", "\ufeffselect 1"), ("a.sql", "select 2;")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = read_migrations([tmp_path / "b.sql", tmp_path / "a.sql"])
    assert [one.place.rpartition("/")[2] for one in found] == ["b.sql:1", "a.sql:1"]
    assert [one.text for one in found] == ["select 1", "select 2"]
