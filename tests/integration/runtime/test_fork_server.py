"""Jobs forked from a process that has imported what they need."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import waldelta
from tests.support.waiting import wait_until
from waldelta.cli.fork_server import ForkServer
from waldelta_airflow.launchers import job_process
from waldelta_airflow.launchers.job_process import ForkedJob


@contextmanager
def running(cwd=None, **environment):
    """A server on a short path, as sockets need, which ends by SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        path = Path(folder) / "jobs.sock"
        process = subprocess.Popen(
            [sys.executable, "-m", "waldelta.cli.fork_server", str(path)],
            cwd=cwd,
            env=os.environ | environment,
        )
        wait_until(lambda: path.exists() or process.poll() is not None)
        yield path, process
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not path.exists()


@pytest.fixture(scope="module")
def server():
    with running(WALDELTA_OF_THE_SERVER="x") as started:
        yield started


@pytest.fixture
def silent():
    """A server that takes connections and never says anything: what a job hangs on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def pipeline(folder, port):
    file = folder / "p.yml"
    file.write_text(
        "pipeline: p\nsource: {conn_id: far, slot: s, publications: [{name: p, tables: [{name:"
        f" public.t}}]}}]}}\ntarget: {{root: 'file://{folder}/lake'}}\n"
    )
    return file, {
        "AIRFLOW_CONN_FAR": f"postgresql://u:w@127.0.0.1:{port}/d",
        "PATH": os.environ["PATH"],
    }


def children(process):
    return psutil.Process(process.pid).children()


def test_a_job_runs_as_a_process_of_its_own_would(server, tmp_path, caplog, monkeypatch):
    """Its output, environment, folder and exit code are the caller's."""
    path, _ = server
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    job = ForkedJob.ask(str(path), ["status", "nowhere.yml"], {"PATH": os.environ["PATH"]})
    assert job.run() == 1
    assert "ConfigError" in caplog.text
    (tmp_path / "here.yml").write_text("no: pipeline\n")
    assert ForkedJob.ask(str(path), ["status", "here.yml"], {"PATH": os.environ["PATH"]}).run() == 1
    assert "pipeline: " in caplog.text  # what the file lacks: it was found in the caller's folder
    assert ForkedJob.ask(str(path), ["frobnicate"], {}).run() == 2
    assert "usage:" in caplog.text


def test_the_environment_is_the_callers_alone(server, tmp_path, caplog):
    """A variable that only the server has isn't there: the pipeline file's root can't use it."""
    path, _ = server
    file, environment = pipeline(tmp_path, 1)
    file.write_text(file.read_text().replace("/lake", "/${WALDELTA_OF_THE_SERVER}"))
    caplog.set_level(logging.INFO)
    assert ForkedJob.ask(str(path), ["status", str(file)], environment).run() == 1
    assert "WALDELTA_OF_THE_SERVER" in caplog.text


def test_jobs_beside_each_other(server, tmp_path, silent):
    """One that hangs keeps none from starting; ended by its task, it is gone."""
    path, process = server
    file, environment = pipeline(tmp_path, silent)
    hanging = ForkedJob.ask(str(path), ["check", str(file)], environment)
    wait_until(lambda: len(children(process)) == 1)
    assert ForkedJob.ask(str(path), ["frobnicate"], {}).run() == 2
    hanging.end()
    wait_until(lambda: not children(process))
    assert hanging.run() in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_a_job_ends_with_its_task(server, tmp_path, silent):
    """A task that is killed says nothing; its connection is gone, and so is the job."""
    path, process = server
    file, environment = pipeline(tmp_path, silent)
    program = (
        "import json, sys; from waldelta_airflow.launchers.job_process import ForkedJob; "
        "job = ForkedJob.ask(sys.argv[1], ['check', sys.argv[2]], json.loads(sys.argv[3])); "
        "print('asked', flush=True); job.run()"
    )
    line = [sys.executable, "-c", program, str(path), str(file), json.dumps(environment)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as task:
        assert task.stdout.readline() == "asked\n"
        assert len(children(process)) == 1
        task.kill()
    wait_until(lambda: not children(process))


def test_the_socket_appears_when_connections_are_taken(tmp_path, monkeypatch):
    """Whoever waits for it connects at once."""
    path, there = tmp_path / "jobs.sock", []
    listen = socket.socket.listen
    monkeypatch.setattr(
        socket.socket, "listen", lambda own: (there.append(path.exists()), listen(own))
    )
    first = ForkServer(path, "")
    assert there == [False]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError, match=re.escape(str(path))):
        ForkServer(path, "")
    first.close()
    assert not path.exists()


def test_who_gave_up_gets_no_job(server, tmp_path, silent, monkeypatch):
    """A task that waited too long starts a process itself; two would collide."""
    path, process = server
    file, environment = pipeline(tmp_path, silent)
    process.send_signal(signal.SIGSTOP)
    try:
        monkeypatch.setattr(job_process, "_ANSWER_TIMEOUT_S", 0.2)
        assert ForkedJob.ask(str(path), ["check", str(file)], environment) is None
        monkeypatch.undo()
    finally:
        process.send_signal(signal.SIGCONT)
    assert ForkedJob.ask(str(path), ["frobnicate"], {}).run() == 2  # after that one's turn
    assert not children(process)


def test_another_installations_server_is_not_used(server, monkeypatch, tmp_path):
    """Two virtual environments and one socket: the task's own code is what runs."""
    monkeypatch.setattr(job_process, "package_folder", lambda: tmp_path / "waldelta")
    assert ForkedJob.ask(str(server[0]), ["frobnicate"], {}) is None
    monkeypatch.undo()
    assert ForkedJob.ask(str(server[0]), ["frobnicate"], {}).run() == 2


def test_sigterm_ends_the_server_and_its_jobs(tmp_path, silent):
    file, environment = pipeline(tmp_path, silent)
    with running() as (path, _):
        job = ForkedJob.ask(str(path), ["check", str(file)], environment)
    assert job.run() in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_the_socket_is_its_owners(server):
    assert stat.S_IMODE(server[0].stat().st_mode) == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_no_other_user_is_answered(server):
    """Even where the file system lets another user in."""
    path, process = server
    program = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX); os.setuid(65534);"
        " s.settimeout(20); s.connect(sys.argv[1]); os.write(1, s.recv(100) or b'closed')"
    )
    path.parent.chmod(0o755)
    path.chmod(0o666)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, check=False
        )
    finally:
        path.chmod(0o600)
        path.parent.chmod(0o700)
    assert done.stdout == b"closed", done.stderr
    assert not children(process)


def test_without_a_server_nothing_is_lost(tmp_path):
    """No socket, a dead server's, another file: the caller starts a process itself."""
    assert ForkedJob.ask(str(tmp_path / "none.sock"), ["status"], {}) is None
    (file := tmp_path / "p.yml").write_text("pipeline: p\n")
    assert ForkedJob.ask(str(file), ["status"], {}) is None
    # A server takes no file's place: this one is a word away from ``waldelta status FILE``.
    with pytest.raises(OSError, match=r"p\.yml"):
        ForkServer(file, "code")
    assert file.read_text() == "pipeline: p\n"
    left = tmp_path / "left.sock"
    with (
        tempfile.TemporaryDirectory(prefix="fork-") as folder,
        socket.socket(socket.AF_UNIX) as dead,
    ):
        dead.bind(f"{folder}/s")
        shutil.move(f"{folder}/s", left)
    assert ForkedJob.ask(str(left), ["status"], {}) is None


@pytest.mark.soak("a second process and a wait for its restart")
def test_replaced_code_is_not_run(tmp_path, monkeypatch):
    """After an upgrade the server starts itself again."""
    source = Path(waldelta.__file__).parent
    shutil.copytree(source, tmp_path / "waldelta", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(job_process, "package_folder", lambda: tmp_path / "waldelta")
    python_path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    with running(tmp_path, PYTHONPATH=python_path) as (path, _):
        (tmp_path / "waldelta" / "__init__.py").write_text('"""Newer."""\n')
        assert ForkedJob.ask(str(path), ["status", "p.yml"], {}) is None
        wait_until(path.exists)
        assert ForkedJob.ask(str(path), ["frobnicate"], {}).run() == 2
