"""The command line as a person meets it: as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from kvferry.client.cli import SHORT_HELP

from .scripted_coordinator import Refuse, ScriptedCoordinator, finished, node_lost, placed, started, tokens


async def kvferry(*arguments: str, stdin: str | None = None, **env: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvferry.client.cli",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | env,
    )
    out, err = await asyncio.wait_for(process.communicate((stdin or "").encode()), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def env(coordinator: ScriptedCoordinator) -> dict[str, str]:
    return {"KVFERRY_COORDINATOR": f"127.0.0.1:{coordinator.port}"}


async def test_help_lists_all_commands_without_importing_a_room():
    code = "import sys, kvferry.client.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in sys.modules if m.startswith('kvferry.')], 'grpc' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    out = (await process.communicate())[0].decode()
    for name, text in SHORT_HELP.items():
        assert f"  {name} " in out, name
        assert text[:40] in out
    assert out.splitlines()[-1] == "['kvferry.client', 'kvferry.client.cli'] False"


async def test_version():
    assert (await kvferry("--version"))[1].startswith("kvferry, version 0.")


async def test_an_unknown_command_is_a_usage_error():
    code, _, err = await kvferry("chatt")
    assert (code, "No such command 'chatt'" in err) == (2, True)


async def test_no_coordinator_is_one_sentence():
    code, out, err = await kvferry("nodes", "--coordinator", "127.0.0.1:1")
    sentence = "error: cannot reach the coordinator at 127.0.0.1:1 (connection refused); is it running?\n"
    assert (code, out, err) == (1, "", sentence)


async def test_chat_says_each_line_of_a_pipe_and_prints_only_answers_to_stdout(coordinator, env):
    coordinator.scripts = [[started(), placed("n1", 1), *tokens(0, 2), finished(2)]] * 2
    coordinator.echo_turn_id = True
    code, out, err = await kvferry(
        "chat", "--system", "be brief", stdin="hello\n\nand now?\n/quit\nnever said\n", **env
    )
    assert (code, out) == (0, "w0 w1 !\nw0 w1 !\n"), err
    assert "n1; 7 tokens: 3 in memory, 0 restored, 4 computed" in err
    generates = [c for c in coordinator.calls if type(c).__name__ == "GenerateRequest"]
    assert [[(m.role, m.content) for m in c.messages] for c in generates] == [
        [("system", "be brief"), ("user", "hello")],
        [("user", "and now?")],
    ]


async def test_chat_tells_of_a_node_that_died(coordinator, env):
    coordinator.echo_turn_id = True
    first = [started(), placed("n1", 1), *tokens(0, 2), node_lost("n1", 2)]
    coordinator.scripts = [[*first, placed("n2", 2, 2), *tokens(2, 3), finished(3)]]
    code, out, err = await kvferry("chat", "-m", "hello", **env)
    assert (code, out.replace("\n", "")) == (0, "w0 w1 w2 !")
    assert "n1 is lost (broken_stream) after 2 tokens" in err
    assert "n2 goes on from token 2" in err


async def test_chat_passes_sampling_on_and_shows_a_refusal_as_one_sentence(coordinator, env):
    coordinator.scripts = [[Refuse("invalid_sampling")]]
    code, out, err = await kvferry("chat", "-m", "hello", "--temperature", "-1", "--seed", "7", "--stop", "END", **env)
    assert (code, out, err.splitlines()[-1]) == (1, "", "error: Refused with invalid_sampling.")
    request = coordinator.calls[-1]
    assert (request.sampling.temperature, request.sampling.seed, list(request.stop)) == (-1, 7, ["END"])


async def test_chat_goes_on_with_a_session_that_exists(coordinator, env):
    coordinator.echo_turn_id = True
    coordinator.scripts = [[started(), *tokens(0, 1), finished(1)]] * 2
    for _ in range(2):
        code, _, err = await kvferry("chat", "--session", "mine", "-m", "hello", "--system", "x", **env)
        assert code == 0, err
    assert "session mine goes on after 1 turns" in err
    assert len(coordinator.calls[-1].messages) == 1  # no second system message


async def test_chat_as_json_is_one_event_a_line(coordinator, env):
    coordinator.echo_turn_id = True
    coordinator.scripts = [[started(), placed("n1", 1), *tokens(0, 1), finished(1)]]
    _, out, _ = await kvferry("chat", "--json", "-m", "hello", **env)
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["started", "placed", "token", "finished"]
    assert (events[2]["token_id"], events[3]["reason"]) == (100, "end")


async def test_sessions_nodes_and_status_as_table_and_as_json(coordinator, env):
    coordinator.echo_turn_id = True
    coordinator.scripts = [[started(), finished(0)]]
    await kvferry("chat", "--session", "mine", "-m", "hello", **env)
    assert "mine" in (await kvferry("sessions", "list", **env))[1]
    assert json.loads((await kvferry("sessions", "list", "--json", **env))[1])[0]["session_id"] == "mine"
    shown = (await kvferry("sessions", "show", "mine", **env))[1]
    assert "[user] hello" in shown
    assert "n1, finished] hi" in shown
    assert (await kvferry("sessions", "fork", "mine", "--name", "other", **env))[1] == "other\n"
    assert (await kvferry("sessions", "delete", "mine", **env))[1] == "deleted mine\n"
    assert (await kvferry("sessions", "delete", "mine", **env))[0] == 1
    assert "n1    live" in (await kvferry("nodes", **env))[1]
    assert json.loads((await kvferry("nodes", "--json", **env))[1])[0]["state"] == "live"
    assert "2 failovers" in (await kvferry("status", **env))[1]
    assert json.loads((await kvferry("status", "--json", **env))[1])["n_failovers"] == 2
