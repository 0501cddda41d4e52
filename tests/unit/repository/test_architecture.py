"""Packages are layers, folders stay small, job code runs over Spark Connect."""

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.source_code import ROOT, modules, nodes_of, tree_of
from tools.messages import docstrings
from waldelta.target_modes.modes import MODES

# folder -> packages of this project that may be imported from there
MAY_IMPORT = {
    "include/waldelta": {"waldelta"},
    "spark_jobs": {"waldelta", "spark_jobs"},
    "include/waldelta_airflow": {"waldelta", "waldelta_airflow"},
    "dags": {"waldelta_airflow"},
    "plugins": {"waldelta_airflow"},
}
OURS = {"waldelta", "spark_jobs", "waldelta_airflow", "demo", "tests"}
# What doesn't exist, or isn't the same, over Spark Connect.
CLASSIC_ONLY = {"sparkContext", "_jvm", "_jsparkSession", "_jdf", "_sc"}
CLASSIC_ONLY |= {"rdd", "toJSON", "foreachPartition", "DeltaTable"}


def only_for_types(path: Path) -> set[int]:
    """The nodes that only type checkers run."""
    return {
        id(inner)
        for node in nodes_of(path)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }


@cache
def imports(path: Path, *, when_run: bool = False) -> tuple[str, ...]:
    """What a file imports, in functions too: ``from a.b import c`` as a.b.c, relative ones with
    their dots in front; with ``when_run`` not what only type checkers see.
    """
    return tuple(_imports(path, when_run=when_run))


def _imports(path: Path, *, when_run: bool) -> Iterator[str]:
    unseen = only_for_types(path) if when_run else set()
    for node in nodes_of(path):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            before = "." * node.level + (f"{node.module}." if node.module else "")
            yield from (before + alias.name for alias in node.names)


def imported(path: Path, *, when_run: bool = False) -> set[str]:
    """The top level of what a file imports."""
    return {name.split(".")[0] or "<relative>" for name in imports(path, when_run=when_run)}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_inwards(folder):
    """Each folder imports only what the table allows, also inside functions."""
    wrong = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in modules(folder)
        if (bad := (imported(path) & OURS) - MAY_IMPORT[folder])
    }
    assert wrong == {}


# Counted without the package's doors.
MOST_MODULES = 15
DOORS = ("__init__.py", "__main__.py")


def layers() -> list[str]:
    """The packages of the library from the bottom to the top; "" holds the modules next to them.

    As CONTRIBUTING.md shows them.
    """
    page = (ROOT / "CONTRIBUTING.md").read_text()
    picture = page.split("```text\nwaldelta:")[1].split("```")[0]
    return ["", *re.findall(r"^([a-z_.]+)  +\S", picture, re.MULTILINE)]


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "include/waldelta").parent.parts)


def module_imports(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Which of these modules a file imports when it runs; exports count as their modules."""
    defined = {EXPORTS.get(name, name) for name in imports(path, when_run=True)}
    return (defined | {name.rpartition(".")[0] for name in defined}) & known.keys()


def _name(path: Path) -> str:
    folder = ROOT / "include" if path.is_relative_to(ROOT / "include") else ROOT
    return ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_name(path): path for path in modules("include/waldelta")}
# What packages export -> where it is defined: a.b.Name -> a.b.module.Name
EXPORTS = {
    f"{package}.{name.rpartition('.')[2]}": name
    for package, path in MODULES.items()
    if path.name == "__init__.py" and package != "waldelta"
    for name in imports(path)
    if name.startswith(f"{package}.")
}


def test_exports_are_what_the_packages_say():
    """Each is in ``__all__``, and is what its module defines."""
    for package, path in MODULES.items():
        if path.name == "__init__.py" and package != "waldelta":
            door = importlib.import_module(package)
            listed = getattr(door, "__all__", [])
            assert sorted(listed) == sorted(
                name.rpartition(".")[2] for name in EXPORTS if name.rpartition(".")[0] == package
            ), package
    for name, defined in EXPORTS.items():
        package, _, exported = name.rpartition(".")
        module = importlib.import_module(defined.rpartition(".")[0])
        door = importlib.import_module(package)
        assert getattr(door, exported) is getattr(module, exported), name


def test_others_import_what_a_package_exports_from_it():
    """Modules of the package itself import from each other."""
    exported = {defined: name for name, defined in EXPORTS.items()}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}: {exported[name]} is meant"
        for folder in (*MAY_IMPORT, "include/demo", "benchmarks")
        for path in modules(folder)
        for name in imports(path)
        if name in exported
        and not f"{_name(path)}.".startswith(f"{exported[name].rpartition('.')[0]}.")
    ]
    assert wrong == []


def test_the_picture_shows_every_package():
    assert sorted(layers()) == sorted(
        {package_of(path) for path in MODULES.values() if path.name != "__init__.py"}
    )


def test_packages_import_only_packages_above_them():
    """Above in the picture; heavy imports inside functions count too. ``__main__`` starts all."""
    order = {package: number for number, package in enumerate(layers())}
    wrong = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        if path.name not in DOORS
        for other in module_imports(path, MODULES)
        if MODULES[other].name != "__init__.py"
        and order[package_of(MODULES[other])] > order[package_of(path)]
    ]
    assert wrong == []


def test_private_modules_are_imported_inside_their_package_only():
    """A module whose name begins with an underscore is its folder's own; tests may import it."""
    wrong = []
    for folder in (*MAY_IMPORT, "include/demo", "benchmarks"):
        for path in modules(folder):
            for name in imports(path):
                parts = name.split(".") if name in MODULES else name.split(".")[:-1]
                private = next((n for n, part in enumerate(parts) if _is_private(part)), None)
                if private is not None and "/".join(parts[:private]) not in path.as_posix():
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


@pytest.mark.parametrize(
    "folder", ["include/waldelta", "include/waldelta_airflow", "include/demo", "benchmarks"]
)
def test_modules_import_each_other_in_no_circle(folder):
    paths = {_name(path): path for path in modules(folder) if path.name != "__init__.py"}
    graph = {name: module_imports(path, paths) - {name} for name, path in paths.items()}
    assert list(TopologicalSorter(graph).static_order())


# package of waldelta_airflow -> those that it may import: pages stand beside what runs the jobs.
OF_AIRFLOW: dict[str, set[str]] = {
    "alerts": set(),
    "reporting": set(),
    "launchers": {"reporting"},
    "operators": {"launchers", "reporting"},
    "dags": {"alerts", "operators", "launchers", "reporting"},
    "views": {"reporting"},
}


@pytest.mark.parametrize("package, allowed", OF_AIRFLOW.items())
def test_packages_of_waldelta_airflow_are_layers(package, allowed):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(f"include/waldelta_airflow/{package}")
        for name in imports(path, when_run=True)
        if name.startswith("waldelta_airflow.")
        and name.split(".")[1] in OF_AIRFLOW.keys() - {package} - allowed
    ]
    assert wrong == []


def test_what_stands_above_spark_loads_no_pyspark():
    """And monitoring, which pages read."""
    light = {*layers()[: layers().index("spark")], "monitoring"}
    heavy = {"pyspark", "great_expectations"}
    wrong = [
        name
        for name, path in MODULES.items()
        if package_of(path) in light and imported(path, when_run=True) & heavy
    ]
    assert wrong == []


# The modules of which all that they do is Spark's, or Great Expectations' on Spark.
OF_SPARK = {
    "waldelta.changes.python_daemon",
    "waldelta.stages.check.great_expectations.run_suite",
    "waldelta.stages.check.suite.spark_conditions",
}


def test_a_module_that_a_small_run_loads_imports_pyspark_in_no_line_of_its_own():
    """It writes Spark SQL, which the methods of a session and its frames take."""
    heavy = {
        name
        for name, path in MODULES.items()
        for node in tree_of(path).body
        if re.match(r"(from|import) pyspark\b", ast.unparse(node))
    }
    assert heavy == OF_SPARK


@pytest.mark.parametrize(
    "folder",
    ["include/waldelta", "include/waldelta_airflow", "include/demo", "spark_jobs", "tests"],
)
def test_no_folder_holds_more_modules_than_one_can_read(folder):
    crowded = {
        str(path.relative_to(ROOT)): count
        for path in [ROOT / folder, *(ROOT / folder).rglob("*/")]
        if (count := sum(file.name not in DOORS for file in path.glob("*.py"))) > MOST_MODULES
    }
    assert crowded == {}


def test_unit_tests_stand_where_their_modules_do():
    """``test_<module>*.py`` in the module's folder, or named as the folder."""
    wrong = []
    for path in (ROOT / "tests/unit").rglob("test_*.py"):
        first, *rest = path.relative_to(ROOT / "tests/unit").parent.parts or [""]
        if first != "repository":
            own = [] if first == "waldelta_airflow" else [first]
            package = "waldelta_airflow" if first == "waldelta_airflow" else "waldelta"
            folder = ROOT.joinpath("include", package, *own, *rest)
            names = [file.stem.lstrip("_") for file in folder.glob("*.py")] + [folder.name]
            name = path.stem.removeprefix("test_")
            if not any(name == other or name.startswith(f"{other}_") for other in names):
                wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


def test_no_relative_imports():
    """One import name everywhere."""
    paths = [path for folder in MAY_IMPORT for path in modules(folder)]
    assert [path.name for path in paths if "<relative>" in imported(path)] == []


def test_job_code_is_connect_clean():
    """Nothing outside session.py touches what only a classic session has."""
    found = {
        f"{path.name}:{node.lineno} {node.attr if isinstance(node, ast.Attribute) else node.id}"
        for folder in ("include/waldelta", "spark_jobs")
        for path in modules(folder)
        if path.name != "session.py"
        for node in nodes_of(path)
        if (
            isinstance(node, ast.Attribute)
            and node.attr in CLASSIC_ONLY
            and not _is_deltalake(path, node.attr)
        )
        or (
            isinstance(node, ast.Name)
            and node.id in CLASSIC_ONLY
            and not _is_deltalake(path, node.id)
        )
    }
    assert found == set()


def _is_deltalake(path: Path, name: str) -> bool:
    """delta-rs has a class of the same name; it is the JVM's that Connect lacks."""
    return name == "DeltaTable" and "deltalake" in imported(path) and "delta" not in imported(path)


# How code names a Delta table, its properties and settings, or Delta's statements, for Spark.
NAMES_DELTA = re.compile(
    r"^spark\.databricks\.delta\.|^delta$|(^|\s)delta\.|\busing delta\b|\btblproperties\b"
    r"|^(version|timestamp)AsOf$|\bversion as of\b|^(optimize|vacuum|reorg table|describe history) "
)


# What every session of Spark is started with.
SPARK_SETTINGS = ROOT / "include/waldelta/spark/settings.py"


def test_only_the_lake_knows_the_table_format():
    """No other module imports delta-rs, or reads, writes or names a Delta table for Spark.

    CONTRIBUTING has what another table format would change besides.
    """
    wrong = [
        f"{path.relative_to(ROOT)} has {found}"
        for folder in ("include/waldelta", "include/waldelta_airflow", "spark_jobs", "plugins")
        for path in modules(folder)
        if "include/waldelta/lake/" not in path.as_posix()
        for found in [
            *({"deltalake", "delta"} & imported(path)),
            *(text for text in texts(path) if NAMES_DELTA.search(text) and path != SPARK_SETTINGS),
        ]
    ]
    assert wrong == []


def texts(path: Path) -> Iterator[str]:
    """The strings of a file, and the parts of its f-strings, without its docstrings."""
    described = docstrings(path)
    constants = (node for node in nodes_of(path) if isinstance(node, ast.Constant))
    for node in constants:
        if isinstance(node.value, str) and id(node) not in described:
            yield node.value


def test_only_target_modes_name_the_modes_that_keep_rows():
    """A new mode is a file of its own and an entry: nothing else decides by a mode's name."""
    names = set(MODES) - {"mirror"}
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("include/waldelta", "include/waldelta_airflow")
        for path in modules(folder)
        if path.parent.name != "target_modes"
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert named == []


def test_only_byte_readers_read_integers_out_of_bytes():
    """Bounds are checked in one module."""
    users = {
        path.name
        for path in modules("include/waldelta/pgoutput")
        if {"struct"} & imported(path)
        or "int.from_bytes" in path.read_text()
        or '">i' in path.read_text()
    }
    assert users <= {"byte_readers.py"}


def test_no_file_grows_beyond_reading():
    """A file that needs more than 650 lines of 100 columns tells more than one story."""
    folders = [*MAY_IMPORT, "include/demo"]
    long = {
        path.name: n
        for f in folders
        for path in modules(f)
        if (n := len(path.read_text().splitlines())) > 650
    }
    assert long == {}


def test_no_function_grows_beyond_a_screen():
    """From ``def`` to its last line, docstring included: then its steps can be read at once."""
    long = {
        f"{path.relative_to(ROOT)} {node.name}": n
        for folder in ("include/waldelta", "spark_jobs")
        for path in modules(folder)
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (n := (node.end_lineno or 0) - node.lineno + 1) > 45
    }
    assert long == {}


# Words that docs/glossary.md's terms replaced; they say less than the field's own.
REPLACED = set(
    re.findall(
        r"\w+",
        """told tell untold tells fed feed feeds standing due bite stretch look looks looked
        patience barred asked settled settle younger saved present emptied renewed gathered
        verbatim reread recopy tally unfold left stands anew beside meanwhile here ahead
        whoever orphans""",
    )
)
KEPT = {
    # Left and right operands.
    "_outside_years(left)",
    "compare(left)",
    "lambda(left)",
    # PostgreSQL's function left().
    "_left_text",
    # Delta's change data feed.
    "CHANGE_DATA_FEED",
    "Target.change_data_feed",
    "TargetTable.change_data_feed",
    "change_data_feed_of",
    "set_change_data_feed",
}


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)}


def named_twice(folders: Iterable[str], names_of: Callable[[Path], Iterable[str]]) -> dict:
    """The names that several modules have, with these modules."""
    held: dict[str, set[str]] = {}
    for path in (path for folder in folders for path in modules(folder)):
        for name in names_of(path):
            held.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in held.items() if len(paths) > 1}


def test_no_public_class_stands_for_two_things():
    """Of the library, Airflow's side and the demo together."""

    def classes(path: Path) -> list[str]:
        found = (node for node in tree_of(path).body if isinstance(node, ast.ClassDef))
        return [node.name for node in found if not node.name.startswith("_")]

    folders = ("include/waldelta", "include/waldelta_airflow", "include/demo")
    assert named_twice(folders, classes) == {}


def test_no_public_constant_stands_for_two_things():
    """Of public modules; type variables are none."""

    def constants(path: Path) -> list[str]:
        if path.name.startswith("_"):
            return []
        given = (node for node in tree_of(path).body if isinstance(node, ast.Assign))
        names = [
            name
            for node in given
            if "TypeVar" not in ast.unparse(node.value)
            for name in _assigned(node)
        ]
        return [name for name in names if name[0] != "_" and name != "log"]

    assert named_twice(["include/waldelta"], constants) == {}


def _names(path: Path) -> Iterator[tuple[str, str]]:
    """Each name that a module defines, with how ``KEPT`` lists it: ``name`` of classes, functions
    and what the module itself holds, ``Class.field`` and ``function(parameter)``.
    """
    for node in tree_of(path).body:
        yield from ((name, name) for name in _assigned(node))
    for node in nodes_of(path):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.name
            for statement in node.body:
                yield from ((name, f"{node.name}.{name}") for name in _assigned(statement))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            function = "lambda" if isinstance(node, ast.Lambda) else node.name
            yield function, function
            given = node.args
            several = [one for one in (given.vararg, given.kwarg) if one is not None]
            for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, *several):
                yield one.arg, f"{function}({one.arg})"


def _assigned(statement: ast.stmt) -> Iterator[str]:
    """The names that an assignment gives a value or a type."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def test_replaced_words_are_no_names():
    """Of modules and what they hold, classes, fields, functions and parameters."""
    found = set()
    for folder in ("include/waldelta", "include/waldelta_airflow", "include/demo", "spark_jobs"):
        for path in modules(folder):
            names = [(path.stem, path.stem), *_names(path)]
            found |= {listed for name, listed in names if words_of(name) & REPLACED}
    # One that is listed and not found would let a new name pass.
    assert sorted(found ^ KEPT) == []


def test_plugin_stems_are_unique_and_importable_nowhere_else():
    """Airflow loads each plugin file under its stem, which must not shadow a module."""
    stems = [path.stem for path in modules("plugins")]
    assert len(stems) == len(set(stems))
    shadowed = [stem for stem in stems if stem in sys.stdlib_module_names or stem in OURS]
    assert shadowed == []


@pytest.mark.parametrize("folder", ["spark_jobs", "include/waldelta/cli/submitted"])
def test_no_job_module_hides_one_of_the_standard_library(folder):
    """spark-submit puts its application's folder first on the path, before the library."""
    stems = {path.stem for path in (ROOT / folder).glob("*")}
    assert stems & sys.stdlib_module_names == set()
