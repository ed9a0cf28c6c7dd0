"""kvferry up, chat and drill as a person runs them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import psutil
import pytest

from kvferry.client.sdk import Client, Token
from kvferry.drills.cluster import LocalCluster
from kvferry.drills.errors import ProcessFailed

from .rig import options

KVFERRY = [sys.executable, "-m", "kvferry.client.cli"]


@pytest.fixture
def up(model, tmp_path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Starts `kvferry up` and gives it with its coordinator's address once it has said what to do next."""
    started: list[subprocess.Popen[str]] = []

    def start(**environment: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [*KVFERRY, "up", "--nodes", "1", "--port", "0", "--http-port", "0", "--dir", str(tmp_path / "up")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environment,
        )
        started.append(process)
        assert process.stdout is not None
        address, said = "", ""
        for line in process.stdout:
            said += line
            found = re.match(r"Talk to it: +(?:env -u KVFERRY_TLS_DIR )?kvferry chat --coordinator (\S+)", line)
            address = found.group(1) if found else address
            if line.startswith("Ctrl-C stops it"):
                return process, address
        raise AssertionError(f"up ended with {process.wait()}: {said}")

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        assert process.stdout is not None
        process.stdout.close()
        process.wait(10)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    assert len(found) == 3  # the coordinator, the gateway and the node
    return found


def assert_gone(processes: list[psutil.Process], timeout_s: float = 20.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not alive, alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_up_leaves_no_process_behind(up, number):
    process, _ = up()
    children = family(process)
    process.send_signal(number)
    assert process.wait(30) == (0 if number is not signal.SIGKILL else -signal.SIGKILL)
    assert_gone(children)


def test_a_closed_terminal_ends_up_in_order(model, tmp_path):
    """The kernel's SIGHUP and a shell's, and nobody there any more to write to."""
    ours, theirs = pty.openpty()
    command = [*KVFERRY, "up", "--nodes", "1", "--port", "0", "--http-port", "0", "--dir", str(tmp_path / "up")]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    said = b""
    while b"Ctrl-C stops it" not in said:
        said += os.read(ours, 4096)
    children = family(process)
    (address,) = re.findall(rb"kvferry chat --coordinator (\S+)", said)
    with Client(address.decode()) as client:
        client.create_session().generate("Name a river.", max_tokens=4).collect()
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    process.wait(30)
    assert_gone(children)
    logs = {name: (tmp_path / "up" / "logs" / f"{name}.log").read_text() for name in ("coordinator", "node-1")}
    assert "drained" in logs["node-1"]
    assert logs["coordinator"].endswith("stopping\n")


def test_each_process_of_it_ends_in_order_when_its_own_terminal_closes(model, tmp_path):
    """Started by hand; a second SIGHUP, the shell's, does not hurry it."""
    with LocalCluster(options(model, tmp_path, n_nodes=1, http_port=0)) as cluster:
        for process in reversed(cluster.processes):
            process.signal(signal.SIGHUP)
            with suppress(ProcessFailed):  # it may have been that quick
                process.signal(signal.SIGHUP)
            assert process.wait_gone(30)
            assert process.return_code == 0
        assert cluster.log_of("coordinator").endswith("stopping\n")
        assert "drained: " in cluster.log_of("node-1")


def test_up_does_not_speak_with_the_certificates_of_another_cluster(up, tmp_path):
    process, address = up(KVFERRY_TLS_DIR=str(tmp_path / "secrets"))
    with Client(address) as client:
        assert [node.node_id for node in client.nodes()] == ["node-1"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.mark.parametrize("which", ["coordinator", "node-1"])
def test_up_starts_again_what_was_killed(up, which):
    process, address = up()
    command = "coordinator" if which == "coordinator" else "node"
    victim = next(child for child in family(process) if command in child.cmdline())
    victim.kill()
    assert process.stdout is not None
    assert process.stdout.readline() == f"{which} was killed by SIGKILL; starting it again in 1 s\n"
    again = re.fullmatch(rf"{which} serves again, pid (\d+)\n", process.stdout.readline())
    assert again is not None
    assert int(again.group(1)) != victim.pid
    said = subprocess.run(
        [*KVFERRY, "chat", "--coordinator", address, "-m", "Say hello.", "--max-tokens", "4"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "4 tokens" in said.stderr


def test_chat_from_a_pipe_and_its_sessions_after_the_next_up(up):
    process, address = up()
    lines = "My name is Ada.\nWhat is the capital of France?\n"
    chat = [*KVFERRY, "chat", "--coordinator", address, "--session", "ada", "--max-tokens", "16"]
    said = subprocess.run(chat, input=lines, capture_output=True, text=True, timeout=60, check=True)
    assert len(said.stdout.strip()) > 20
    assert len(re.findall(r"\[node-\d; \d+ tokens: \d+ in memory, \d+ restored, \d+ computed;", said.stderr)) == 2
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0

    _, address = up()
    shown = subprocess.run(
        [*KVFERRY, "sessions", "show", "ada", "--json", "--coordinator", address],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    details = json.loads(shown.stdout)
    assert [turn["messages"][0]["content"] for turn in details["turns"]] == lines.splitlines()
    chat[chat.index("--coordinator") + 1] = address
    again = subprocess.run(chat, input="And of Spain?\n", capture_output=True, text=True, timeout=60, check=True)
    reuse = re.search(r"(\d+) tokens: 0 in memory, (\d+) restored", again.stderr)
    assert reuse is not None, again.stderr
    assert int(reuse.group(2)) > 40


class Terminal:
    """Our end of a pseudo terminal with a command at the other."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self._unread = ""

    def type(self, line: str) -> None:
        os.write(self._fd, line.encode() + b"\n")

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def read_until(self, text: str, timeout_s: float = 60.0) -> str:
        """All that came up to and with `text`; what comes after it is for the next call."""
        deadline = time.monotonic() + timeout_s
        while text not in self._unread and time.monotonic() < deadline:
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self._unread += os.read(self._fd, 4096).decode(errors="replace")
                except OSError:  # the other side is gone
                    break
        assert text in self._unread, self._unread
        before, _, self._unread = self._unread.partition(text)
        return before + text


@contextmanager
def in_a_terminal(*command: str) -> Iterator[Terminal]:
    """Must end well."""
    ours, its = pty.openpty()
    environment = os.environ | {"COLUMNS": "100", "TERM": "xterm"}
    process = subprocess.Popen(
        [*KVFERRY, *command], stdin=its, stdout=its, stderr=its, start_new_session=True, env=environment
    )
    os.close(its)
    try:
        yield Terminal(process, ours)
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        os.close(ours)


def chatting(address: str, *arguments: str) -> AbstractContextManager[Terminal]:
    return in_a_terminal("chat", "--coordinator", address, *arguments)


def test_chat_in_a_terminal(cluster):
    with chatting(cluster.address, "--max-tokens", "12") as terminal:
        terminal.read_until("> ")
        terminal.type("Say hello.")
        assert "in memory" in terminal.read_until("first after")
        terminal.read_until("> ")
        terminal.type("/nonsense")
        terminal.read_until("there is no command /nonsense")
        terminal.read_until("> ")
        terminal.type("/sessions")
        assert "tokens" in terminal.read_until("> ")
        terminal.type("/quit")


def test_ctrl_c_stops_an_answer_and_not_the_conversation(cluster):
    with chatting(cluster.address, "--max-tokens", "1500") as terminal:
        terminal.read_until("> ")
        terminal.type("Write a very long story about a ferry, in twenty chapters.")
        terminal.read_until(" the ")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until(", stopped")
        terminal.read_until("> ")
        terminal.type("Say hello in one word.")
        terminal.read_until("first after")
        terminal.type("/quit")


def test_chat_survives_a_restart_of_the_coordinator(cluster):
    command = [*KVFERRY, "chat", "--coordinator", cluster.address, "--max-tokens", "300", "--json"]
    command += ["-m", "Write a long story about a river."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as chat:
        assert chat.stdout is not None
        events = []
        killed = False
        for line in chat.stdout:
            events.append(json.loads(line))
            if not killed and sum(event["event"] == "token" for event in events) == 5:
                killed = True
                cluster.kill_coordinator()
                cluster.start_coordinator()
        assert chat.wait(60) == 0
    tokens = [event["sequence"] for event in events if event["event"] == "token"]
    assert tokens == list(range(len(tokens)))
    assert len(tokens) > 100
    assert any(event["event"] == "connection_lost" for event in events)
    assert events[-1]["event"] == "finished"
    cluster.ensure_all_live()


@pytest.mark.slow
def test_the_demo_keeps_its_promise_and_says_so(model, tmp_path):
    report = tmp_path / "demo.json"
    done = subprocess.run(
        [*KVFERRY, "drill", "demo", "--seed", "7", "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens lost 0, duplicated 0, differing 0" in " ".join(done.stdout.split())
    verdict = json.loads(report.read_text())["verdict"]
    assert (verdict["good"], verdict["n_turns"], verdict["lost"]) == (True, 3, 0)
    assert verdict["n_tokens_compared"] > 150


def test_the_drills_are_listed():
    listed = subprocess.run([*KVFERRY, "drill", "list"], capture_output=True, text=True, check=True)
    assert listed.stdout.startswith("demo  ")


def test_top_shows_the_streams_of_a_real_cluster(cluster):
    with in_a_terminal("top", "--coordinator", cluster.address, "--interval", "0.2") as terminal:
        terminal.read_until("node-1")
        with Client(cluster.address) as client, client.create_session().generate("Tell a long story.") as turn:
            next(event for event in turn if isinstance(event, Token))
            terminal.read_until("decode")
            turn.cancel()
        terminal.read_until("no turn runs")
        terminal.press("q")
