"""Texts of other programs and people are parsed in bounded time and memory, or refused."""

import os

import pytest
import yaml

from waldelta.config.parse_text import parse_json, parse_yaml, read_yaml_file
from waldelta.config.pipeline_folder import PipelineFolder
from waldelta.errors import ConfigError

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
    "nested lists": "[" * DEPTH,
    "nested JSON": '{"a":' * 5_000 + "1" + "}" * 5_000,
    "nested blocks": "- " * 5_000 + "1",
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


def test_one_file_of_a_folder_is_refused_and_the_others_are_read(tmp_path, write_pipeline):
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
