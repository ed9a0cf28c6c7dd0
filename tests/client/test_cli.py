"""The command line as a person meets it: as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys

import pytest

from kvferry.client.cli import SHORT_HELP
from kvferry.proto.v1 import chat_pb2

from .scripted_coordinator import Refuse, finished, node_lost, parts, placed, started, tokens


async def kvferry(
    *arguments: str | bytes, stdin: str | bytes = b"", redirect: str = "", **env: str
) -> tuple[int, str, str]:
    """Exit code, stdout, stderr; `redirect` is for a shell."""
    command: list[str | bytes] = [sys.executable, "-m", "kvferry.client.cli", *arguments]
    if redirect:
        command = ["sh", "-c", f'"$@"{redirect}', "sh", *command]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | env,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin.encode() if isinstance(stdin, str) else stdin), 120)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


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


CALL = chat_pb2.ToolCall(id="turn-1.0", name="weather", arguments='{"city": "São Paulo", "days": [1, 2]}')


async def test_chat_shows_thinking_apart_and_calls_readably(coordinator, env):
    coordinator.echo_turn_id = True
    answer = chat_pb2.ParsedAnswer(reasoning="Hm", content="Let me see", tool_calls=[CALL], malformed_calls=["{x"])
    coordinator.scripts = [[
        started(), placed("n1", 1),
        parts(0, "<think>"), parts(1, "Hm", chat_pb2.AnswerPart(reasoning="Hm")),
        parts(2, "...", chat_pb2.AnswerPart(content="Let me see")),
        parts(3, "...", chat_pb2.AnswerPart(tool_call=CALL)),
        finished(4, answer=answer),
    ]]  # fmt: skip
    code, out, err = await kvferry("chat", "-m", "hello", **env)
    assert code == 0, err
    assert out == 'Let me see\nweather(city="São Paulo", days=[1, 2])\n!\n'
    assert "\nHm\n" in err
    assert "what should have been a call is none: {x" in err


async def test_chat_tells_the_model_of_tools_once_and_gives_it_results(coordinator, env, tmp_path):
    coordinator.echo_turn_id = True
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}, {"name": "clock"}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    second = chat_pb2.ToolCall(id="turn-1.1", name="clock", arguments="{}")
    calls = chat_pb2.ParsedAnswer(tool_calls=[CALL, second])
    coordinator.scripts = [[started(), placed("n1", 1), finished(0, answer=calls)]] + [[started(), finished(0)]] * 2
    code, _, err = await kvferry(
        "chat", "--tools", str(tmp_path / "tools.json"), "--no-thinking",
        stdin="hello\n/result 25 C\n/result noon\n/result too much\nthanks\n", **env
    )  # fmt: skip
    assert code == 0, err
    asked = [c for c in coordinator.calls if type(c).__name__ == "GenerateRequest"]
    assert [[(m.role, m.content, m.tool_call_id) for m in c.messages] for c in asked] == [
        [("user", "hello", "")],
        [("tool", "25 C", "turn-1.0"), ("tool", "noon", "turn-1.1")],
        [("user", "thanks", "")],
    ]
    assert [[tool.name for tool in c.tools] for c in asked] == [["weather", "clock"], [], []]
    assert asked[0].tools[0].parameters == '{"type": "object"}'
    assert [(c.HasField("thinking"), c.thinking) for c in asked] == [(True, False)] * 3
    assert "[and clock()?]" in err
    assert "[the last answer called no tool]" in err


async def test_chat_asks_for_the_form_of_an_answer(coordinator, env, tmp_path):
    coordinator.echo_turn_id = True
    coordinator.scripts = [[started(), finished(0)]] * 5
    (tmp_path / "s.json").write_text('{"type": "object"}')
    (tmp_path / "t.json").write_text('[{"name": "f"}]')
    tools = ["--tools", str(tmp_path / "t.json")]
    for flags in (
        ["--schema", str(tmp_path / "s.json"), "--thinking"], ["--regex", "a+"], ["--choice", "a", "--choice", "b"],
        [*tools, "--call"], [*tools, "--call", "f"],
    ):  # fmt: skip
        code, _, err = await kvferry("chat", *flags, "-m", "hello", **env)
        assert code == 0, err
    asked = [c for c in coordinator.calls if type(c).__name__ == "GenerateRequest"]
    assert [c.format.WhichOneof("format") for c in asked] == ["json_schema", "regex", "choices", None, None]
    assert (asked[0].format.json_schema, asked[0].thinking, asked[1].format.regex) == ('{"type": "object"}', True, "a+")
    assert [(c.tool_choice, c.tool_name) for c in asked[3:]] == [(1, ""), (1, "f")]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--tools", "{}"], "holds no JSON list of tools"),
        (["--tools", "[]"], "holds no JSON list of tools"),
        (["--tools", "["], "is no JSON"),
        (["--tools", '[{"x": 1}]'], "Tool 1 in .* has no name"),
        (["--tools", '[{"name": "f", "parameters": 7}]'], "Tool 1 in .* parameters that are no JSON schema"),
        (["--schema", "[]"], "holds no JSON object"),
        (["--regex", "a", "--choice", "b"], "use one of them"),
    ],
)
async def test_a_file_of_tools_that_is_none_is_a_usage_error(coordinator, env, tmp_path, flags, sentence):
    if flags[0] in {"--tools", "--schema"}:
        (tmp_path / "file.json").write_text(flags[1])
        flags = [flags[0], str(tmp_path / "file.json")]
    code, _, err = await kvferry("chat", *flags, "-m", "hello", **env)
    assert code == 2
    assert re.search(sentence, err), err
    assert coordinator.calls == []


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
    request = next(call for call in coordinator.calls if type(call).__name__ == "GenerateRequest")
    assert (request.sampling.temperature, request.sampling.seed, list(request.stop)) == (-1, 7, ["END"])


@pytest.mark.parametrize("name", [[], ["--session", "mine"]])
@pytest.mark.parametrize("code", ["invalid_sampling", "prompt_too_long", "empty_prompt", "invalid_message"])
async def test_a_chat_whose_first_turn_is_refused_leaves_no_session(coordinator, env, name, code):
    coordinator.scripts = [[Refuse(code)]]
    assert (await kvferry("chat", "-m", "hello", *name, **env))[0] == 1
    assert coordinator.sessions == {}


async def test_a_session_that_was_there_stays_when_its_turn_is_refused(coordinator, env):
    coordinator.echo_turn_id = True
    coordinator.scripts = [[started(), finished(0)], [Refuse("prompt_too_long")]]
    for expected in (0, 1):
        assert (await kvferry("chat", "-m", "hello", "--session", "mine", **env))[0] == expected
    assert list(coordinator.sessions) == ["mine"]


@pytest.mark.parametrize("stdin", [b"", b"\n \n", b"/quit\n", b"caf\xe9\n"])
async def test_a_chat_that_says_nothing_leaves_no_session(coordinator, env, stdin):
    await kvferry("chat", stdin=stdin, **env)
    assert coordinator.sessions == {}


@pytest.mark.parametrize(
    "flags",
    [
        ["--top-k", str(10**11)],
        ["--seed", str(2**64)],
        ["--seed", "-1"],
        ["--max-tokens", str(10**11)],
    ],
)
async def test_a_number_that_is_too_large_names_field_and_bounds_and_leaves_no_session(coordinator, env, flags):
    code, _, err = await kvferry("chat", "-m", "hello", *flags, **env)
    field = flags[0].removeprefix("--").replace("-", "_")
    assert (code, err.startswith(f"error: {field} cannot be {flags[1]}: it is a whole number from 0 to ")) == (1, True)
    assert coordinator.sessions == {}


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
@pytest.mark.parametrize("utf8_mode", ["0", "1"])
async def test_input_that_is_not_utf8_is_one_sentence(coordinator, env, locale, utf8_mode):
    coordinator.scripts = [[started(), finished(0)]]
    coordinator.echo_turn_id = True
    code, _, err = await kvferry("chat", stdin=b"fine\ncaf\xe9 au lait\n", **env, LC_ALL=locale, PYTHONUTF8=utf8_mode)
    sentence = "error: Line 2 of the standard input is not UTF-8: byte 4 is 0xe9."
    assert (code, err.splitlines()[-1]) == (1, sentence)


@pytest.mark.parametrize("flag", ["-m", "--system", "--session", "--stop"])
async def test_an_argument_that_is_not_utf8_is_one_sentence(coordinator, env, flag):
    code, _, err = await kvferry("chat", flag, b"caf\xe9", "-m", "hello", **env)
    assert (code, err.count("error: "), "is not valid Unicode" in err) == (1, 1, True), err
    assert "Traceback" not in err


async def test_a_closed_input_is_a_usage_error(env):
    code, _, err = await kvferry("chat", redirect=" <&-", **env)
    assert (code, "The standard input is closed" in err) == (2, True), err


@pytest.mark.parametrize("command", [["chat", "-m", "hello"], ["nodes"], ["status", "--json"], ["--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("target", "code"), [(">/dev/full", 1), (">/dev/full 2>&1", 1), (">&-", 0)])
async def test_an_output_that_cannot_be_written_is_one_sentence(coordinator, env, command, target, code, unbuffered):
    coordinator.echo_turn_id = True
    coordinator.scripts = [[started(), *tokens(0, 2), finished(2)]]
    ended, out, err = await kvferry(*command, redirect=f" {target}", **env, PYTHONUNBUFFERED=unbuffered)
    assert (ended, out, "Traceback" in err) == (code, "", False), err
    if target == ">/dev/full":
        assert err.splitlines()[-1] == "error: cannot write to the standard output: no space left on device."


async def test_waiting_for_a_coordinator_is_told_at_once():
    code, _, err = await kvferry("chat", "-m", "hello", "--patience", "1", "--coordinator", "127.0.0.1:1")
    sentence = "cannot reach the coordinator at 127.0.0.1:1 (connection refused); is it running?"
    assert (code, err) == (1, f"[{sentence}; trying on for 1 s]\nerror: {sentence}\n")


async def test_a_full_state_disk_is_told_at_once(coordinator, env):
    coordinator.refusals = [Refuse("registry_unavailable", 10)]
    coordinator.scripts = [[started(), finished(0)]]
    coordinator.echo_turn_id = True
    code, _, err = await kvferry("chat", "-m", "hello", **env)
    assert (code, err.splitlines()[0]) == (0, "[Refused with registry_unavailable; trying on for 60 s]")


@pytest.mark.parametrize("address", ["", "127.0.0.1:99999", "localhost"])
@pytest.mark.parametrize("command", [["nodes"], ["chat", "-m", "x"], ["sessions", "list"], ["status"]])
async def test_an_address_that_is_none_is_one_sentence(address, command):
    code, _, err = await kvferry(*command, "--coordinator", address)
    assert (code, err.startswith(f"error: The coordinator's address {address!r} "), err.count("\n")) == (1, True, 1)


async def test_a_turn_that_is_not_there_cannot_be_explained(coordinator, env):
    coordinator.sessions["s"] = chat_pb2.Session(session_id="s")
    for form in ([], ["--json"]):
        said = await kvferry("route", "--explain", "s", "--turn", "x", *form, **env)
        assert said == (1, "", "error: session s has no turn x\n")


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
    assert bytes(events[2]["token_bytes"]) == b"w0 "


async def test_a_node_with_another_key_is_told_of_in_one_sentence(coordinator, env):
    assert "another" not in (await kvferry("nodes", **env))[1]
    coordinator.other_key = True
    for command in ("nodes", "status"):
        lines = (await kvferry(command, **env))[1].splitlines()
        assert any("another key" in line and line.lstrip().startswith("n1 ") for line in lines)
        assert lines[-1].startswith("n1 has another store key than the coordinator: only nodes with the same")


async def test_a_new_session_is_the_tenants_that_is_named_and_an_old_one_stays_its_own(coordinator, env):
    coordinator.echo_turn_id = True
    coordinator.scripts = [[started(), finished(0)]] * 2
    assert (await kvferry("chat", "--session", "mine", "--tenant", "acme", "-m", "hello", **env))[0] == 0
    assert coordinator.sessions["mine"].tenant == "acme"
    assert ", tenant acme" in (await kvferry("sessions", "show", "mine", **env))[1]
    code, _, err = await kvferry("chat", "--session", "mine", "--tenant", "bolt", "-m", "hello", **env)
    assert code == 2
    assert "Session mine is not one of tenant bolt" in err
    assert (await kvferry("chat", "--session", "mine", "-m", "hello", **env))[0] == 0


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
    (told,) = json.loads((await kvferry("nodes", "--json", **env))[1])
    assert (told["state"], told["store"]["bytes_saved"], told["store"]["write_budget_left"]) == ("live", 3 << 20, None)
    status = (await kvferry("status", **env))[1]
    assert "2 failovers" in status
    assert "stores: 3.0 MiB saved" in status
    assert json.loads((await kvferry("status", "--json", **env))[1])["n_failovers"] == 2


@pytest.mark.parametrize("flag", ["--tools", "--schema"])
async def test_a_file_without_end_is_refused_and_not_read_for_ever(coordinator, env, flag):
    code, _, err = await kvferry("chat", flag, "/dev/zero", "-m", "hello", **env)
    assert code == 2
    assert "has more than 4 MiB, which is the limit" in err
    assert coordinator.calls == []
