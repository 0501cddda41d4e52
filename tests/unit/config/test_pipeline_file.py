"""Options in the pipeline file: what they come to, and which can't be honoured and are refused."""

import os
import re
from pathlib import Path

import pytest
import yaml
from airflow.timetables.base import TimeRestriction
from airflow.timetables.interval import CronDataIntervalTimetable
from pydantic import ValidationError

from waldelta.config import Publication, Source, load_pipeline_file
from waldelta.config.parse_text import parse_json, parse_yaml, problems, read_yaml_file
from waldelta.config.pipeline_file import Maintenance, PipelineFile, Target, json_schema
from waldelta.config.pipeline_folder import PipelineFolder
from waldelta.config.source import Options
from waldelta.errors import ConfigError
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, Run, now
from waldelta.pgoutput.message_kinds import protocol_version
from waldelta.slot.read.peek import most_messages, plugin_options, without_streaming

REPOSITORY = Path(__file__).parents[3]


def source(**options):
    return Source(
        conn_id="c",
        slot="s",
        publications=(Publication(name="p", all_tables=True),),
        options=Options(**options),
    )


@pytest.mark.parametrize(
    "options, version, sent",
    [
        ({}, 1, {}),
        ({"messages": True}, 1, {"messages": "true"}),
        ({"binary": True}, 1, {"binary": "true"}),
        ({"origin": "none"}, 1, {"origin": "none"}),
        ({"streaming": "on"}, 2, {"streaming": "on"}),
        ({"streaming": True}, 2, {"streaming": "on"}),  # YAML's bare on
        ({"streaming": False}, 1, {}),
        ({"two_phase": True}, 3, {"two_phase": "true"}),
        ({"two_phase": True, "streaming": "on"}, 3, {"streaming": "on", "two_phase": "true"}),
        ({"streaming": "parallel"}, 4, {"streaming": "parallel"}),
        ({"streaming": "on", "messages": True}, 2, {"streaming": "on", "messages": "true"}),
    ],
    ids=str,
)
def test_the_lowest_version_that_serves(options, version, sent):
    """Only what is asked for is sent to the server."""
    chosen = source(**options)
    assert protocol_version(chosen.options) == version
    names = plugin_options(chosen)
    expected = {"proto_version": str(version), "publication_names": '"p"'} | sent
    assert dict(zip(names[::2], names[1::2], strict=True)) == expected
    assert protocol_version(without_streaming(chosen).options) == (
        3 if options.get("two_phase") else 1
    )
    assert most_messages(chosen, 8) == (None if "streaming" in sent else 10)


def test_options_that_are_refused():
    with pytest.raises(ValidationError, match="'off', 'on' or 'parallel'"):
        Options(streaming="maybe")


def test_retention_below_a_week():
    """Delta's VACUUM would refuse it at night."""
    with pytest.raises(ValidationError, match="168"):
        Maintenance(keep_versions_hours=24)


def write_pipeline(folder, quality=""):
    (folder / "pipelines").mkdir(parents=True)
    path = folder / "pipelines" / "shop.yml"
    path.write_text(
        "pipeline: shop\nsource: {conn_id: c, slot: s, publications: [{name: p, all_tables:"
        f" true}}]}}\ntarget: {{root: 'file:///lake'}}\nquality: {{{quality}}}\n"
    )
    return path


def test_own_suites_are_found_wherever_the_reader_stands(tmp_path, monkeypatch):
    """Airflow's tasks stand in another folder; suites looked for there would never run."""
    monkeypatch.chdir(tmp_path)
    path = write_pipeline(tmp_path / "a")
    assert load_pipeline_file(path).quality.suites is None
    (tmp_path / "a/expectations/shop").mkdir(parents=True)
    assert load_pipeline_file(path).quality.suites == str(tmp_path / "a/expectations/shop")
    assert load_pipeline_file("a/pipelines/shop.yml").quality.suites == str(
        tmp_path / "a/expectations/shop"
    )


def test_the_demo_has_suites_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WALDELTA_LAKE", "file:///lake")
    found = load_pipeline_file(REPOSITORY / "include/pipelines/flights.yml").quality.suites
    assert found == str(REPOSITORY / "include/expectations/flights")


def test_folders_are_relative_to_the_pipeline_file(tmp_path):
    (tmp_path / "mine").mkdir()
    quality = load_pipeline_file(
        write_pipeline(tmp_path, "suites: ../mine, data_docs: docs")
    ).quality
    assert Path(quality.suites).resolve() == tmp_path / "mine"
    assert Path(quality.data_docs) == tmp_path / "pipelines/docs"


def test_a_named_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"quality.suites of pipeline 'shop': there is no folder .*absent: create it",
    ):
        load_pipeline_file(write_pipeline(tmp_path, "suites: absent"))


ALLOWED = [("WALDELTA_LAKE", None), ("BUCKET", "BUCKET"), ("BUCKET", " LAKE , BUCKET")]


@pytest.mark.parametrize(("name", "allowed"), ALLOWED)
def test_a_root_has_variables_that_are_for_pipeline_files(name, allowed, monkeypatch):
    """Those of the product's own prefix, and those that the operator has listed."""
    monkeypatch.setenv(name, "file:///lakes")
    if allowed:
        monkeypatch.setenv("WALDELTA_ALLOWED_VARIABLES", allowed)
    target = Target(root=f"${{{name}}}/shop")
    assert (target.root, target.written_root) == ("file:///lakes/shop", f"${{{name}}}/shop")
    assert target.model_copy(update={}).written_root == f"${{{name}}}/shop"


REFUSED = [
    ("SECRET", None),
    ("SECRET", "SECRETS,BUCKET"),
    ("AIRFLOW__CORE__FERNET_KEY", "*"),
    ("waldelta_lake", None),
]


@pytest.mark.parametrize(("name", "allowed"), REFUSED)
def test_a_root_has_no_other_variable(name, allowed, monkeypatch):
    """Airflow's API server, which reads these files, has secrets in its environment."""
    monkeypatch.setenv(name, "s3cr3t")
    if allowed:
        monkeypatch.setenv("WALDELTA_ALLOWED_VARIABLES", allowed)
    with pytest.raises(
        ValidationError, match=f"environment variable {name} isn't .* WALDELTA_ALLOWED_VARIABLES"
    ) as caught:
        Target(root=f"file:///lake/${{{name}}}")
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("char", " %#?\\|[]{}*^\n\r\t\x01\x7f\u2028", ids=ascii)
def test_a_root_that_leads_to_two_folders_is_refused(char):
    """delta-rs drops a newline, and encodes or refuses others; Hadoop takes some for patterns."""
    with pytest.raises(
        ValidationError, match=r"Spark and delta-rs read differently: rename the folder"
    ):
        Target(root=f"file:///data/la{char}ke")


def test_a_root_that_leads_to_one_folder_is_taken(tmp_path):
    name = "la`'\";$()<>&!~+,@=:éke"
    root = Target(root=f"file://{tmp_path}/{name}").root
    Ledger(Lake(root)).append(Run(now(), "r", "consume", "running"))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert [run.run_id for run in Ledger(Lake(root)).runs()] == ["r"]


# As the DAGs' timetable takes them; what it would fail by only at the next run is refused too.
SCHEDULES = {
    "*/10 * * * *": None,
    "17 3 * * MON-FRI": None,
    "0 0 L * *": None,
    "0 0 * * 5#2": None,
    "0 0 * * * 30": None,
    "@hourly": None,
    "@quarterly": None,
    "@annually": None,
    "every 10 min": "not a cron expression",
    "": "not a cron expression",
    "*/10": "not a cron expression",
    "60 * * * *": "not a cron expression",
    "H * * * *": "not a cron expression",
    "@once": "not a cron expression",
    "@continuous": "not a cron expression",
    "@every 10m": "not a cron expression",
    "00:10:00": "not a cron expression",
    "R * * * *": "a random time",
    "0 0 30 2 *": "times that never come",
}
SCHEDULED = [
    "schedule: {}",
    "maintenance: {{schedule: {}}}",
    "quality: {{reconcile: {{schedule: {}}}}}",
    "quality: {{full_check: {}}}",
]


@pytest.mark.parametrize("schedule, refused", SCHEDULES.items())
def test_a_schedule_is_one_that_the_dags_can_run_by(tmp_path, schedule, refused):
    for key in SCHEDULED:
        path = write_file(tmp_path, more=key.format(f"'{schedule}'"))
        if refused is None:
            load_pipeline_file(path)
            timetable = CronDataIntervalTimetable(schedule, "UTC")
            timetable.validate()
            assert timetable.next_dagrun_info(
                last_automated_data_interval=None,
                restriction=TimeRestriction(None, None, catchup=False),
            )
        else:
            place = key.replace(": {{", ".").partition(":")[0]
            with pytest.raises(
                ConfigError, match=rf"- {re.escape(place)}: {refused}.* write five fields such as"
            ):
                load_pipeline_file(path)


def write_file(folder, root="file:///lake", more=""):
    path = folder / "shop.yml"
    source = "{conn_id: shop, slot: s, publications: [{name: p, all_tables: true}]}"
    target = "" if more.startswith("target") else f"target: {{root: '{root}'}}\n"
    path.write_text(f"pipeline: shop\nsource: {source}\n{target}{more}\n")
    return path


# None: taken; else what to write in its place.
FILE_ROOTS = {
    "file:///tmp/x": None,
    "file:///tmp/x/": None,
    "file:///.hidden/x": None,
    "file:///tmp/../x": "file:///x",
    "file://tmp/x": "file:///tmp/x",
    "file:tmp/x": "file:///tmp/x",
    "file:/tmp/x": "file:///tmp/x",
    "file:////tmp/x": "file:///tmp/x",
    "file://localhost/tmp/x": "file:///tmp/x",
    "FILE:///tmp/x": "file:///tmp/x",
    "file://./tmp/x": "file:///tmp/x",
    "file://../tmp/x": "file:///tmp/x",
    "file:./tmp/x": "file:///tmp/x",
    "file://~/x": "file:///x",
    "file:///~ada/x": "file:///x",
    "file://.hidden/x": "file:///.hidden/x",
    "file:///": "file:// and an absolute path",
    "file://": "file:// and an absolute path",
    "file:": "file:// and an absolute path",
    "file://.": "file:// and an absolute path",
    "file:///tmp/..": "file:// and an absolute path",
    "file:///../etc": "file:///etc",
    "/tmp/x": "file:///tmp/x",
}


@pytest.mark.parametrize("root, remedy", FILE_ROOTS.items())
def test_a_file_root_is_an_absolute_path(tmp_path, root, remedy):
    """Else its first folder would be taken for a host, and the lake made at the root."""
    path = write_file(tmp_path, root)
    if remedy is None:
        assert load_pipeline_file(path).target.root == root.rstrip("/")
        return
    with pytest.raises(ConfigError, match=rf"- target.root: .* write {re.escape(remedy)}"):
        load_pipeline_file(path)
    if root.lower().startswith("file"):
        with pytest.raises(
            ConfigError, match=rf"- quality.data_docs: .* write {re.escape(remedy)}"
        ):
            load_pipeline_file(write_file(tmp_path, more=f"quality: {{data_docs: '{root}'}}"))


OTHER_STORES = ("foo://x/y", "memory://x", "http://host/lake", "s3n://b/x", "az://c/x", "adl://c/x")
NO_BUCKET = ("s3a://", "s3a:///lake", "s3://@/lake", "s3a://:9000/lake", "gs:///lake",
             "abfss://c@/lake")  # fmt: skip
ROOTS = dict.fromkeys(OTHER_STORES, r"no lake can be written to \w+://")
ROOTS |= {root: f"it names no bucket: write {root.partition(':')[0]}://" for root in NO_BUCKET}
# Spark reads a/../b as b; an object store has it as a name of its own.
ROOTS["s3a://bucket/a/../b"] = r".* write the path without \.\."


@pytest.mark.parametrize("root, told", ROOTS.items())
def test_a_root_that_cant_be_written_is_refused(tmp_path, root, told):
    """Setup would make the publication before it found out."""
    with pytest.raises(ConfigError, match=f"- target.root: {told}"):
        load_pipeline_file(write_file(tmp_path, root))


def test_keys_that_are_written_twice_are_refused_with_their_lines(tmp_path):
    """YAML's readers take the last one, and say nothing."""
    path = write_file(
        tmp_path,
        more="batch: {max_changes: 1}\nquality:\n  notify: &n {a: 1, a: 2}\n  b: *n\nbatch: {}",
    )
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(path)
    assert (
        str(caught.value)
        == f"{path} is not valid YAML: each key is written once: quality.notify.a is"
        " on line 6 twice, batch is on lines 4 and 8"
    )


def test_what_follows_from_another_problem_is_none_of_its_own(tmp_path):
    """An entry that is refused isn't missing, too."""
    path = write_file(tmp_path)
    path.write_text(
        path.read_text().replace("all_tables: true", "tables: [{name: public.a, wher: x}]")
    )
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(path)
    _, *problems = str(caught.value).splitlines()
    assert problems == [
        "  - source.publications[0].tables[0].wher: unknown key: did you mean where?"
    ]


# The entries of a publication, a table, and the entries that publish it.
PUBLISHED = {
    "every table": ([{"name": "sales.*"}], ("sales", "orders"), ["sales.*"]),
    "another schema": ([{"name": "sales.*"}], ("Sales", "orders"), []),
    "part of a name": ([{"name": "s.order_*"}], ("s", "order_2"), ["s.order_*"]),
    "case counts": ([{"name": "s.order_*"}], ("s", "Order_2"), []),
    "the whole name": ([{"name": "s.*_log"}], ("s", "a_log_2"), []),
    "any character": ([{"name": "s.a*b"}], ("s", 'a.\n"b'), ["s.a*b"]),
    "an underscore is no wildcard": ([{"name": "s.a_*"}], ("s", "axb"), []),
    "quoted schema": ([{"name": '"Odd.s".*'}], ("Odd.s", "t"), ['"Odd.s".*']),
    "quoted star": ([{"name": 's."a*"'}], ("s", "ab"), []),
    "a table of that name": ([{"name": 's."a*"'}], ("s", "a*"), ['s."a*"']),
    "left out": ([{"name": "s.*", "exclude": ["s.a"]}], ("s", "a"), []),
    "left out by a pattern": ([{"name": "s.*", "exclude": ["s.tmp_*"]}], ("s", "tmp_1"), []),
    "not left out": ([{"name": "s.*", "exclude": ["s.tmp_*"]}], ("s", "tmp"), ["s.*"]),
    "left out of one": ([{"name": "s.*", "exclude": ["s.a"]}, {"name": "s.a*"}], ("s", "a"),
     ["s.a*"]),
    "its own entry counts": ([{"name": "s.*"}, {"name": "s.a"}], ("s", "a"), ["s.a"]),
    "its own entry, left out": ([{"name": "s.*", "exclude": ["s.a"]}, {"name": "s.a"}], ("s", "a"),
     ["s.a"]),
    "two patterns": ([{"name": "s.*"}, {"name": "s.a*"}], ("s", "ab"), ["s.*", "s.a*"]),
}  # fmt: skip


@pytest.mark.parametrize("tables, table, published_by", PUBLISHED.values(), ids=PUBLISHED)
def test_which_entry_publishes_a_table(tables, table, published_by):
    publication = Publication(name="p", tables=tables, new_tables="report")
    assert [entry.name for entry in publication.entries_of(table)] == published_by
    if publication.patterns:
        adopting = publication.model_copy(update={"new_tables": "adopt"})
        by_pattern = any(entry.is_pattern for entry in publication.entries_of(table))
        assert (publication.adopts(table), adopting.adopts(table)) == (False, by_pattern)


@pytest.mark.parametrize(
    "publication, match",
    [
        ({"tables": [{"name": "s*.t"}]}, "a pattern's schema is written out"),
        ({"tables": [{"name": "*"}]}, "not a schema-qualified table name"),
        ({"tables": [{"name": "s.*", "columns": ["a"]}]}, "columns can't be combined"),
        ({"tables": [{"name": "s.t", "exclude": ["s.u"]}]}, "exclude is for patterns"),
        ({"tables": [{"name": "s.*", "exclude": ["r.u", "s.v"]}]}, "exclude has r.u, which s.*"),
        ({"tables": [{"name": "s.*", "exclude": ["u"]}]}, "not a schema-qualified table name"),
        ({"tables": [{"name": "s.*"}, {"name": "s.*", "where": "a"}]}, "listed twice: s.*"),
        ({"tables": [{"name": "s.*"}], "manage": False}, "list its tables instead of s.*"),
        ({"tables": [{"name": "s.t"}], "new_tables": "adopt"}, "adopt needs a pattern"),
        ({"all_tables": True, "new_tables": "adopt"}, "adopt needs a pattern"),
    ],
    ids=str,
)
def test_patterns_that_are_refused(publication, match):
    with pytest.raises(ValidationError, match=re.escape(match)):
        Publication(name="p", **publication)


UNREADABLE = {
    "a tab": ("\tbatch: {}", "line 4, column 1: found character '\\t' that cannot start any token"),
    "an open quote": ("owner: 'me",
     "line 5, column 1: found unexpected end of stream (while scanning a quoted scalar, line 4)"),
    "a colon in a value": ("owner: a: b", "line 4, column 9: mapping values are not allowed here"),
    "a control character": ("owner: \x07", "line 4, column 8: character #x0007"),
    "no anchor": ("tags: *x", "line 4, column 7: found undefined alias 'x'"),
    "a Python object": ("owner: !!python/object:os.x {}",
     "line 4, column 8: could not determine a constructor for the tag"),
}  # fmt: skip


@pytest.mark.parametrize("more, place", UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_is_no_yaml_is_refused_with_line_and_column(tmp_path, more, place):
    """YAML's own message calls the file "<unicode string>", and shows the line's text."""
    path = write_file(tmp_path, more=more)
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(path)
    assert str(caught.value).startswith(f"{path} is not valid YAML: {place}")
    assert "\n" not in str(caught.value)


REFUSED = {
    "shcedule: null": "shcedule: unknown key: did you mean schedule?",
    "quality: {reconcile: {schedul: null}}":
     "quality.reconcile.schedul: unknown key: did you mean schedule?",
    "target: {root: 'file:///lake', tables: {public.t: {form: public.s}}}":
     "target.tables.public.t.form: unknown key: did you mean from?",
    "notify: [{errors: [any], notifyer: a.b}]":
     "notify[0].notifyer: unknown key: did you mean notifier?",
    "slot: s": "slot: unknown key here: write it as source.slot",
    "max_changes: 5": "max_changes: unknown key here: write it as batch.max_changes",
    "where: id > 1": ("where: unknown key here: write it as source.publications[].tables[].where or"
                      " target.tables.<name>.where"),
    "tables: {}": "tables: unknown key here: write it as source.publications[].tables or ",
    "xyzzy: 5": "xyzzy: unknown key: remove it; pipeline, source, target, ",
    "batch: {max_changes: many}": "batch.max_changes: a whole number is needed (given: 'many')",
    "batch: {max_changes: 1.5}": "batch.max_changes: a whole number is needed (given: 1.5)",
    "batch: {max_changes: -1}": "batch.max_changes: 1 or more is needed (given: -1)",
    "batch: [1]": "batch: keys with values are needed, as in `key: value`",
    "tags: demo": "tags: a list is needed, as in `[a, b]` (given: 'demo')",
    "owner: 5": "owner: a text is needed: quote it (given: 5)",
    "owner: [a]": "owner: a text is needed: quote it",
    "quality: {enabled: maybe}": "quality.enabled: true or false is needed (given: 'maybe')",
    "target: {root: 'file:///lake', tables: {public.t: {mode: mirorr}}}":
     ("target.tables.public.t.mode: one of mirror, soft_delete, history, changelog is needed: did"
      " you mean mirror? (given: 'mirorr')"),
    "row_values: reed":
     "row_values: one of read, trigger, edit is needed: did you mean read? (given: 'reed')",
    "5: 6": "[5]: a key is a text: quote it (given: 5)",
}  # fmt: skip


@pytest.mark.parametrize("more, told", REFUSED.items(), ids=REFUSED)
def test_an_unknown_key_or_wrong_value_is_refused_with_what_is_meant(tmp_path, more, told):
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(write_file(tmp_path, more=more))
    assert f"\n  - {told}" in str(caught.value)


def keys_of(schema, definitions):
    """Yields the path of each key that a pipeline file may have."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for part in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        yield from keys_of(part, definitions)
    for name, of in schema.get("properties", {}).items():
        yield (name,)
        yield from ((name, *rest) for rest in keys_of(of, definitions))
    if isinstance(items := schema.get("items"), dict):
        yield from ((0, *rest) for rest in keys_of(items, definitions))
    if isinstance(values := schema.get("additionalProperties"), dict):
        yield from (("public.a", *rest) for rest in keys_of(values, definitions))


SCHEMA = json_schema()
KEYS = sorted(set(keys_of(SCHEMA, SCHEMA["$defs"])), key=str)
OF_PYDANTIC = re.compile(
    r"Input should|[Ii]nput|valid (tuple|dictionary|string|list)|instance of|parse|type=|pydantic"
)


@pytest.mark.parametrize("value", ["x y", 5, -1.5, None, True, [1], {"a": 1}], ids=repr)
def test_no_message_is_in_the_words_of_the_library_that_validates(value):
    """Whichever key has a value of another kind."""
    assert len(KEYS) > 80
    for path in KEYS:
        document = value
        for part in reversed(path):
            document = [document] if part == 0 else {part: document}
        try:
            PipelineFile.model_validate(document)
        except ValidationError as err:
            for told in problems(err, PipelineFile):
                assert not OF_PYDANTIC.search(told), told


DEPTH = 100_000


def laughs(entry: str) -> str:
    """Nine lists, each of which has the one before it nine times."""
    lists = [entry.format(n=n, items=", ".join([f"*l{n - 1}"] * 9)) for n in range(1, 10)]
    return "\n".join(["l0: &l0 {a: 1, b: 2}", *lists])


BOMBS = {
    "aliases": laughs("l{n}: &l{n} [{items}]"),
    "merge keys": laughs("l{n}: &l{n} {{<<: [{items}]}}"),
    "a list within itself": "a: &a [*a]",
    "a mapping within itself": "a: &a {b: *a}",
    # Deeper ones take the parser longer: it reads ahead, by the square of the depth.
    "nested lists": "[" * 700,
    "nested JSON": '{"a":' * 700 + "1" + "}" * 700,
    "nested blocks": "- " * 700 + "1",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_small_text_that_becomes_a_large_document_is_refused(text):
    with pytest.raises(yaml.YAMLError, match=r"nested too deeply|stand for .* 50,000 values"):
        parse_yaml(text)


def test_aliases_and_merge_keys_are_still_read():
    text = "base: &base {a: 1}\nother: {<<: *base, b: 2}\nlist: [*base, *base]"
    assert parse_yaml(text)["other"] == {"a": 1, "b": 2}


def test_json_that_is_nested_too_deeply_is_invalid_json():
    for text in ("[" * DEPTH + "]" * DEPTH, '{"a":' * DEPTH + "1" + "}" * DEPTH, "{"):
        with pytest.raises(ValueError, match=r"nested too deeply|Expecting property name"):
            parse_json(text)


def _link(path):
    path.symlink_to("/dev/zero")


def _large(path):
    path.write_text("# " + "x" * (1 << 20))


FILES = {
    "a FIFO": (os.mkfifo, "is not a regular file"),
    "a device": (_link, "is not a regular file"),
    "a large file": (_large, "bytes, and 1,048,576 are allowed"),
    "an image": (lambda path: path.write_bytes(b"\xff\xd8"), "is not text in UTF-8"),
}


@pytest.mark.parametrize(("make", "message"), FILES.values(), ids=FILES)
def test_what_is_no_yaml_file_is_refused_by_name(tmp_path, make, message):
    make(tmp_path / "shop.yml")
    with pytest.raises(ConfigError, match=rf"shop\.yml .*{message}"):
        read_yaml_file(tmp_path / "shop.yml")


def test_one_file_of_a_folder_is_refused_and_the_others_are_read(write_pipeline):
    good = write_pipeline("shop")
    for number, text in enumerate(BOMBS.values()):
        (good.parent / f"bomb{number}.yml").write_text(text)
    os.mkfifo(good.parent / "fifo.yml")
    found = PipelineFolder.read(good.parent)
    assert [one.pipeline for one in found.pipelines.values()] == ["shop"]
    assert len(found.refused) == len(BOMBS) + 1
    for path, error in found.refused.items():
        assert isinstance(error, ConfigError)
        assert path.name in str(error)
