"""Processes of a cluster end when they are told to, when they must, and when their parent is gone; no others do."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvferry.drills.cluster import ClusterOptions, LocalCluster
from kvferry.drills.errors import DirectoryBusy, PortUnusable, ProcessFailed
from kvferry.drills.process import ManagedProcess

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(60)"
POLITE = "import time; ready(); time.sleep(60)"
THOROUGH = """
import signal, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
ready()
while not asked:
    time.sleep(0.01)
time.sleep({seconds})
print("asked", len(asked), "times")
"""


@pytest.fixture
def managed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ManagedProcess]:
    """A process whose command line main is replaced by a stand-in that runs its first argument as Python."""
    stand_in = tmp_path / "sitecustomize.py"
    stand_in.write_text(
        "import kvferry.client.cli as cli, json, os, sys\n"
        "def main(arguments):\n"
        "    def ready():\n"
        "        with open(arguments[1] + '.new', 'w') as file: json.dump({'pid': os.getpid()}, file)\n"
        "        os.rename(arguments[1] + '.new', arguments[1])  # as the real ones do\n"
        "    exec(arguments[0], {'ready': ready})\n"
        "cli.main = main\n"
    )
    ready_file = tmp_path / "p.ready"
    environment = {"PYTHONPATH": str(tmp_path)}
    process = ManagedProcess("p", [POLITE, str(ready_file)], ready_file, tmp_path / "p.log", environment)
    yield process
    if process.is_running:
        process.kill()


def test_start_ready_stop(managed):
    managed.start()
    assert managed.wait_ready(20) == {"pid": managed.pid}
    assert os.getpgid(managed.pid) == managed.pid  # a Ctrl-C in our terminal does not reach it
    assert managed.stop() is True
    assert managed.return_code == -signal.SIGTERM


def test_one_that_does_not_listen_is_killed(managed):
    managed.arguments[0] = STUBBORN
    managed.start()
    managed.wait_ready(20)
    assert managed.stop(timeout_s=0.3) is False
    assert managed.return_code == -signal.SIGKILL


def test_nodes_of_a_cluster_are_asked_once_however_long_the_others_take(managed, tmp_path):
    """Asked again, a node ends without saving its sessions."""
    ready_file, environment = tmp_path / "q.ready", {"PYTHONPATH": str(tmp_path)}
    code = THOROUGH.format(seconds=0.8)
    other = ManagedProcess("q", [code, str(ready_file)], ready_file, tmp_path / "q.log", environment)
    managed.arguments[0] = THOROUGH.format(seconds=0.3)
    cluster = LocalCluster(ClusterOptions(model="none", directory=tmp_path / "cluster", n_nodes=2))
    cluster.nodes |= {"node-1": managed, "node-2": other}
    for process in (managed, other):
        process.start()
        process.wait_ready(20)
    assert cluster.stop_processes() == []
    assert [log.read_text() for log in (managed.log_file, other.log_file)] == ["asked 1 times\n"] * 2


def test_a_frozen_one_can_be_stopped(managed):
    managed.start()
    managed.wait_ready(20)
    managed.signal(signal.SIGSTOP)
    assert managed.stop() is True


class EndsWhenLookedAt(ManagedProcess):
    """As one does that ends between a look and what is done because of it."""

    @property
    def is_running(self) -> bool:
        was_running = super().is_running
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        return was_running


@pytest.mark.parametrize("end", [LocalCluster.stop, LocalCluster.kill_all])
def test_one_that_ends_by_itself_meanwhile_does_not_keep_the_others_from_being_ended(managed, tmp_path, end):
    cluster = LocalCluster(ClusterOptions(model="none", directory=tmp_path / "cluster", n_nodes=1))
    cluster.nodes["node-1"] = managed
    managed.start()
    managed.__class__ = EndsWhenLookedAt
    end(cluster)
    assert not managed.is_running


def test_what_its_starter_shows_to_other_clusters_is_not_inherited(managed, monkeypatch):
    for name in ("KVFERRY_TLS_DIR", "KVFERRY_TOKEN", "KVFERRY_NODE_NAME_OF_A_TEST"):
        monkeypatch.setenv(name, "given")
    managed.arguments[0] = "import os; print(*sorted(n for n in os.environ if os.environ[n] == 'given'))"
    managed.start()
    assert managed.wait_gone(20)
    assert managed.log_file.read_text() == "KVFERRY_NODE_NAME_OF_A_TEST\n"


def test_one_that_fails_says_why(managed):
    managed.arguments[0] = (
        "import sys; print('noise'); print('error: The port is taken.', file=sys.stderr); sys.exit(1)"
    )
    managed.start()
    with pytest.raises(ProcessFailed, match=r"p did not start: The port is taken\."):
        managed.wait_ready(20)


def test_what_does_not_run_cannot_be_killed(managed):
    with pytest.raises(ProcessFailed, match="p is not running"):
        managed.kill()


def test_old_words_are_not_quoted_for_a_new_failure(managed):
    managed.log_file.write_text("error: An old story.\n")
    managed.arguments[0] = "pass"
    managed.start()
    with pytest.raises(ProcessFailed, match="said nothing"):
        managed.wait_ready(20)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_end_when_their_parent_is_gone(managed, tmp_path, number, is_frozen):
    """Also what a killed test had frozen: nobody would thaw it."""
    made_of = (managed.arguments, str(managed.ready_file), str(managed.log_file), managed.environment)
    parent_code = (
        "import time; from pathlib import Path; from kvferry.drills.process import ManagedProcess\n"
        f"arguments, ready, log, environment = {made_of!r}\n"
        "p = ManagedProcess('p', arguments, Path(ready), Path(log), environment)\n"
        "p.start(); p.wait_ready(20); print(p.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
    if is_frozen:
        child.send_signal(signal.SIGSTOP)
        while child.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
    parent.send_signal(number)
    parent.wait(10)
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_two_clusters_do_not_share_a_directory(tmp_path):
    first = LocalCluster(ClusterOptions(model="m", directory=tmp_path))
    first.folder.lock()
    with pytest.raises(DirectoryBusy, match="Another cluster runs in"):
        LocalCluster(ClusterOptions(model="m", directory=tmp_path)).start()
    first.stop()


def test_a_directory_that_is_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryBusy, match=r"Cannot use .*file.*not a directory"):
        LocalCluster(ClusterOptions(model="m", directory=tmp_path / "file"))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)", "was killed by signal 37"),
        ("print('INFO all is well')", "ended by itself"),
        (
            "import sys; print('error: The disk is full.'); print('INFO bye'); sys.exit(3)",
            "ended by itself with exit code 3 (The disk is full)",
        ),
    ],
)
def test_how_it_ended_is_told_without_guessing(managed, code, said):
    managed.arguments[0] = code
    managed.start()
    assert managed.wait_gone(20)
    assert managed.how_it_ended() == said


def test_its_exit_code_is_passed_on(managed):
    managed.arguments[0] = "import sys; print('error: No such model.'); sys.exit(4)"
    managed.start()
    with pytest.raises(ProcessFailed) as caught:
        managed.wait_ready(20)
    assert caught.value.exit_code == 4


def test_starting_again_leaves_no_file_open(managed):
    gc.collect()  # what other tests left open may be closed at any moment
    n_open = psutil.Process().num_fds()
    for _ in range(3):
        managed.start()
        os.kill(managed.pid, signal.SIGKILL)
        while managed.is_running:
            time.sleep(0.01)
    managed.wait_gone(10)
    assert psutil.Process().num_fds() <= n_open


def test_a_port_that_is_taken_is_told_in_words_of_up(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortUnusable, match=rf"127\.0\.0\.1:{port} \(address already in use\).*--port"):
            LocalCluster(ClusterOptions(model="m", directory=tmp_path, port=port)).start()


@pytest.mark.parametrize("interrupted", [False, True])
def test_half_written_files_go_when_the_cluster_stops(tmp_path, monkeypatch, interrupted):
    cluster = LocalCluster(ClusterOptions(model="m", directory=tmp_path))
    cluster.folder.lock()
    store = tmp_path / "store" / "f"
    store.mkdir()
    for folder, name in ((store, "kv_0.kv.node-1.0.9.tmp"), (tmp_path / "run", ".tmp-x1y2"), (store, "a.kv")):
        (folder / name).touch()
    if interrupted:
        monkeypatch.setattr(cluster, "stop_processes", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            cluster.stop()
    else:
        cluster.stop()
    assert [
        path.name for path in tmp_path.rglob("*") if path.suffix in {".tmp", ".kv"} or path.name.startswith(".tmp")
    ] == ["a.kv"]


def test_a_port_for_both_is_told_before_anything_starts(tmp_path):
    with pytest.raises(PortUnusable, match="--port and --http-port are both 17171"):
        ClusterOptions(model="m", directory=tmp_path, port=17171, http_port=17171)
    ClusterOptions(model="m", directory=tmp_path, port=0, http_port=0)  # any two that are free


def test_errors_name_the_options_of_who_started_it(managed):
    managed.options_told = {"--listen": "--port"}
    managed.arguments[0] = "import sys; print('error: give another --listen, not --listen-backlog'); sys.exit(1)"
    managed.start()
    assert managed.wait_gone(20)
    assert managed.how_it_ended().endswith("(give another --port, not --listen-backlog)")
    with pytest.raises(ProcessFailed, match="give another --port, "):
        managed.wait_ready(20)
