"""The scripts that complete in shells; bash runs its own."""

import builtins
import shutil
import subprocess

import pytest

from waldelta.cli._options import SHELLS, VERBS, VERBS_WITHOUT_FILE
from waldelta.cli.command_line import main

COMPLETED = [
    ("waldelta rec", 1, {"reconcile"}),
    ("waldelta check shop", 2, {"shop.yml"}),
    ("waldelta consume shop.yml --ag", 3, {"--again"}),
    ("waldelta completion f", 2, {"fish"}),
    ("waldelta airflow s", 2, {"setup"}),
    ("waldelta airflow setup --dr", 3, {"--dry-run"}),
]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_verb(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    words = [word for verb in (*VERBS, *VERBS_WITHOUT_FILE) for word in verb.split()]
    assert [word for word in words if word not in script] == []
    assert "python -m" not in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("line, word, found", COMPLETED, ids=[case[0] for case in COMPLETED])
def test_bash_completes(line, word, found, tmp_path, capsys):
    (tmp_path / "shop.yml").touch()
    assert main(["completion", "bash"]) == 0
    script = (
        f"{capsys.readouterr().out}\nCOMP_WORDS=({line}); COMP_CWORD={word}\n"
        "$(complete -p waldelta | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert {word.strip() for word in done.stdout.splitlines()} == found


def test_without_shtab_the_extra_is_named(monkeypatch, caplog):
    known = builtins.__import__

    def without_shtab(name, *rest):
        if name == "shtab":
            raise ImportError(name)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_shtab)
    assert main(["completion", "bash"]) == 1
    assert "run `pip install 'waldelta[cli]'`" in caplog.text
