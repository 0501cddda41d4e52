"""Names and texts of a proposed file, without a database."""

from dataclasses import replace

import pytest
import yaml

from waldelta.config import load_pipeline_file
from waldelta.errors import ConfigError
from waldelta.postgres import CatalogRelation, Leaf, PgType, TableColumn, TableId
from waldelta.stages.setup.draft import Draft, FoundTable, Inventory, notes_of, pipeline_name
from waldelta.stages.setup.facts.source_facts import ServerFacts

INT = PgType(23, -1, "integer", type_name="int4")


def table(name: TableId, identity: str = "d", key: tuple[str, ...] = ("id",)) -> FoundTable:
    columns = (TableColumn("id", 1, INT, not_null=True),)
    leaf = Leaf(name, 1, 1, 1, 8192, replica_identity=identity, identity_columns=key)
    relation = CatalogRelation(
        name, 1, "r", "p", identity, owned=False, extension_owned=False, columns=columns,
        primary_key=key, identity_columns=key, ancestors=(),
    )  # fmt: skip
    return FoundTable(relation, (leaf,), 2, 0, (), has_row_security=False)


def server(*, superuser: bool = False) -> ServerFacts:
    return ServerFacts(
        180000, False, {}, "me", "shop", superuser, False, True, True, True, True, 0, 0, 0, False
    )


def draft(*tables: FoundTable, taken=(), **fields) -> Draft:
    inventory = Inventory(
        server(superuser=bool(taken)), tables,
        excluded={TableId("s", f"t{n}"): "unlogged" for n in range(22)},
        publications=frozenset(taken), slots=frozenset(taken), roles=frozenset({"me", *taken}),
    )  # fmt: skip
    given = {"conn_id": "shop", "pipeline": "shop", "root": "file:///tmp/lake"}
    return Draft(inventory, tables, **given | fields)


@pytest.mark.parametrize(
    "name",
    [
        TableId("public", "orders"),
        TableId("odd.schema", 'a"b'),
        TableId("null", "true"),
        TableId("S", "- x: #"),
        TableId("s", "line\nbreak\u2028\x85\t"),
        TableId("s", "é😀\x7f"),
        TableId("s", "${WALDELTA_X} {{ x }} %s '"),
    ],
)
def test_any_name_is_read_back(name):
    found = draft(table(name), table(TableId("public", "log"), "d", ()))
    main, inserts = found.load().source.publications
    assert [TableId(*entry.parts) for entry in main.tables] == [name]
    assert [entry.name for entry in inserts.tables] == ["public.log"]


@pytest.mark.parametrize("word", ["on", "null", "true", "yes", "no"])
def test_words_of_yaml_stay_names(word):
    file = draft(table(TableId("public", "t")), conn_id=word, pipeline=word).load()
    assert (file.source.conn_id, file.pipeline) == (word, word)


def test_few_of_many_tables_that_are_left_out_are_named():
    text = draft(table(TableId("public", "t"))).as_yaml()
    assert text.count("unlogged") == 20
    assert "# and 2 more" in text
    assert yaml.safe_load(text)["source"]["slot"] == "shop_cdc"


def test_what_the_product_refuses_is_refused():
    with pytest.raises(ConfigError, match="cron"):
        draft(table(TableId("public", "t")), schedule="never").load()


def test_the_sql_has_the_identity_that_a_keyless_table_needs():
    sql = draft(table(TableId("public", "log"), "d", ())).as_sql()
    assert "-- alter table public.log replica identity full;" in sql
    assert "publish = 'insert, truncate'" in sql
    assert "grant select on public.log to me;" in sql
    assert "create role" not in sql


@pytest.mark.parametrize("where", ["region = 'EU'", 'id > 1 and "a: b" is null', "true -- x"])
def test_a_filter_is_read_back(where):
    filtered = draft(table(TableId("public", "t")), where=where)
    (publication,) = filtered.load().source.publications
    assert [entry.where for entry in publication.tables] == [where]
    assert f"where ({where}" in filtered.as_sql()


TAKEN = {
    "nothing": ((), "shop"),
    "others' names": (("store_pub", "shop", "shop_publication"), "shop"),
    "the publication": (("shop_pub",), "shop_2"),
    "the publication of keyless tables": (("shop_inserts_pub",), "shop_2"),
    "the slot": (("shop_cdc",), "shop_2"),
    "the next name, too": (("shop_pub", "shop_2_cdc"), "shop_3"),
}


@pytest.mark.parametrize("taken, name", TAKEN.values(), ids=TAKEN)
def test_a_default_name_is_one_whose_slot_and_publications_are_free(taken, name):
    """The script would fail, or setup would refuse the file that init has just written."""
    proposed = draft(table(TableId("public", "t")), taken=taken)
    assert proposed.with_free_names().pipeline == name
    if name != "shop":
        with pytest.raises(ConfigError, match=r"the server has .* choose another pipeline name"):
            proposed.load()


def test_a_role_that_exists_is_not_created_again():
    there = draft(table(TableId("public", "t")), taken=["shop_reader"])
    assert "create role" not in there.as_sql()
    assert "grant select on public.t to shop_reader;" in there.as_sql()
    assert "create role shop_reader" in draft(table(TableId("public", "t")), taken=["x"]).as_sql()


@pytest.mark.parametrize(
    "database, name",
    [
        ("shop", "shop"),
        ("Shop-2 (test)", "shop_2_test"),
        ("1", "p_1"),
        ("___", "pipeline"),
        ("é", "pipeline"),
        ("x" * 63, "x" * 51),
    ],
)
def test_a_databases_name_becomes_a_pipelines(database, name, tmp_path):
    assert pipeline_name(database) == name
    path = tmp_path / "file.yml"
    path.write_text(draft(table(TableId("public", "log"), "d", ()), pipeline=name).as_yaml())
    assert load_pipeline_file(path).pipeline == name


def test_only_what_is_no_text_on_the_source_becomes_text():
    names = {18: '"char"', 19: "name", 25: "text", 869: "inet", 1042: "character(3)"}
    names |= {1043: "character varying", 2950: "uuid"}
    types = [PgType(oid, -1, name, type_name=name) for oid, name in names.items()]
    types += [PgType(20_000, -1, "code", kind="domain", base=types[2])]
    types += [PgType(20_001, -1, "mood", kind="enum", type_name="mood", type_schema="public")]
    columns = (TableColumn(f"c{kind.oid}", k + 1, kind, False) for k, kind in enumerate(types))
    noted = table(TableId("public", "t"))
    noted = replace(noted, relation=replace(noted.relation, columns=tuple(columns)))
    told = next(note for note in notes_of(noted) if note.startswith("text in the lake"))
    assert told == "text in the lake: c869 (inet), c2950 (uuid), c20001 (mood)"


def test_a_key_that_a_copy_may_stop_at_is_noted():
    kinds = {"b": PgType(1082, -1, "date"), "c": PgType(23, -1, "integer")}
    kinds["d"] = PgType(1182, -1, "date[]", kind="array", element=kinds["b"])
    columns = (TableColumn(name, k, kind, True) for k, (name, kind) in enumerate(kinds.items()))
    noted = table(TableId("public", "t"), key=tuple(kinds))
    noted = replace(noted, relation=replace(noted.relation, columns=tuple(columns)))
    (told,) = (note for note in notes_of(noted) if note.startswith("a copy stops"))
    assert "key column b that" in told


KEYS = {
    "replica identity nothing": ("n", ("id",), (), "key (id), replica identity nothing", False),
    "a primary key": ("d", ("id",), ("id",), "key (id), replica identity default", True),
    "an index": ("i", (), ("id",), "key of an index (id), replica identity using index", True),
    "all columns": ("f", (), ("id",), "key of all columns, replica identity full", False),
    "no key": ("d", (), (), "no key, replica identity default", False),
}


@pytest.mark.parametrize("identity, primary, own, told, of_key", KEYS.values(), ids=KEYS)
def test_comments_agree_on_the_key(identity, primary, own, told, of_key):
    """A table that is said to have no key has no key column, and no filter over its columns."""
    found = table(TableId("public", "t"), identity, own)
    at = TableColumn("id", 1, PgType(1184, -1, "timestamptz", type_name="timestamptz"), False)
    relation = replace(found.relation, primary_key=primary, columns=(at,))
    text = draft(replace(found, relation=relation)).as_yaml()
    assert f"{told}\n" in text
    is_keyless = not (primary or own)
    assert ("no key" in text) is ("it has no primary key" in text) is is_keyless
    assert ("key column" in text) is bool(own)
    assert ("over columns of the key" in text) is of_key


def test_a_keyless_table_says_which_part_of_its_identity_is_missing():
    found = table(TableId("public", "t"))
    (why,) = notes_of(replace(found, leaves=(replace(found.leaves[0], identity_columns=("x",)),)))
    assert why.startswith("its partitions have another replica identity")
    generated = replace(found.relation.columns[0], generated="s")
    relation = replace(found.relation, columns=(generated,))
    why = next(notes_of(replace(found, relation=relation)))
    assert why.startswith("a generated column is part of its replica identity")
