"""What a client may ask, and the sentence that each mistake gets."""

from __future__ import annotations

import grpc
import pytest

from kvferry.coordinator.errors import BadRequest, CoordinatorError
from kvferry.coordinator.registry import PageKey
from kvferry.coordinator.requests import answer_budget, page_key, page_size, page_token, turn_request
from kvferry.engine.errors import EngineError
from kvferry.proto.status import STATUS_OF
from kvferry.proto.v1 import chat_pb2, common_pb2


def ask(*messages: tuple[str, str], **fields: object) -> chat_pb2.GenerateRequest:
    made = [chat_pb2.ChatMessage(role=role, content=content) for role, content in messages or [("user", "hi")]]
    return chat_pb2.GenerateRequest(**{"session_id": "s", "messages": made, **fields})


def sampling(**fields: object) -> chat_pb2.GenerateRequest:
    return ask(sampling=common_pb2.SamplingSettings(**fields))


DEEP = '{"a":' * 65 + "1" + "}" * 65
FORMAT = chat_pb2.OutputFormat(regex="a")


def said(**message: object) -> chat_pb2.GenerateRequest:
    return ask(messages=[chat_pb2.ChatMessage(**message), chat_pb2.ChatMessage(role="user", content="hi")])


def call(name: str, arguments: str, call_id: str = "") -> chat_pb2.ToolCall:
    return chat_pb2.ToolCall(id=call_id, name=name, arguments=arguments)


def tool(name: str, parameters: str = "") -> chat_pb2.Tool:
    return chat_pb2.Tool(name=name, parameters=parameters)


BAD = [
    (ask(messages=[]), "empty_prompt", "at least one message"),
    (ask(("user", " \n")), "empty_prompt", "has no text"),
    (ask(("robot", "hi")), "invalid_message", "role 'robot': give one of system, user, assistant"),
    (ask(("user", "hi"), ("system", "be")), "invalid_message", "message 2 has the role system"),
    (ask(("user", "hi"), ("assistant", "ho")), "invalid_message", "has to be the user's"),
    (ask(("tool", "25"), ("assistant", "ho")), "invalid_message", "has to be the user's or a tool's"),
    (said(role="user", content="hi", reasoning="hm"), "invalid_message", "message 1 .* only an assistant's"),
    (said(role="user", content="hi", tool_calls=[call("f", "{}")]), "invalid_message", "message 1 .* only an"),
    (said(role="user", content="hi", tool_call_id="a"), "invalid_message", "message 1 .* only a tool's message"),
    (said(role="assistant", tool_calls=[call("f", "[1]")]), "invalid_message", "'f' with arguments that are no JSON"),
    (said(role="assistant", tool_calls=[call("", "{}")]), "invalid_message", "a tool without a name"),
    (said(role="assistant", tool_calls=[call("f", "{}", "x" * 257)]), "invalid_message", "257 characters"),
    (ask(tools=[tool("a b")]), "invalid_tools", "tool 1 has the name 'a b'"),
    (ask(tools=[tool("a"), tool("a")]), "invalid_tools", "two tools have the name a"),
    (ask(tools=[tool("a", "[]")]), "invalid_tools", "the parameters of the tool a are no JSON object"),
    (ask(tools=[tool("a", "[" * 99999)]), "invalid_tools", "the parameters of the tool a are nested more than 64 deep"),
    (ask(tools=[tool("a", DEEP)]), "invalid_tools", "the parameters of the tool a are nested more than 64 deep"),
    (ask(tools=[tool("a", '{"type": "string"}')]), "invalid_tools", 'tool a have the type "string": arguments are an'),
    (ask(tools=[tool("a", '{"type": ["object", "null"]}')]), "invalid_tools", "tool a have the type .*: arguments are"),
    (said(role="assistant", tool_calls=[call("f", DEEP)]), "invalid_message", "arguments that are nested more than 64"),
    (said(role="assistant", tool_calls=[call("f", "[" * 99999)]), "invalid_message", "that are nested more than 64"),
    (said(role="assistant", tool_calls=[call("f", '{"a": NaN}')]), "invalid_message", "are no JSON .NaN is none of"),
    (said(role="assistant", tool_calls=[call("f", r'{"a": "\ud83e"}')]), "invalid_message", "are no text: half of a"),
    (ask(tools=[tool(f"t{i}") for i in range(129)]), "invalid_tools", "129 tools: at most 128"),
    (ask(tools=[tool("a", '"' + "x" * (1 << 20) + '"')]), "invalid_tools", "more than 1048576 characters"),
    (ask(tool_choice=7), "invalid_tools", "tool_choice is 7"),
    (ask(tool_name="a"), "invalid_tools", "tool_choice does not require a call"),
    (ask(tool_choice=1, format=FORMAT), "invalid_format", "ask for one of them"),
    (ask(format=chat_pb2.OutputFormat()), "invalid_format", "the format is empty"),
    (ask(*[("user", "hi")] * 1025), "invalid_message", "1025 messages"),
    (ask(session_id=""), "invalid_name", "session_id is ''"),
    (ask(session_id="a/b"), "invalid_name", "session_id is 'a/b'"),
    (ask(session_id="ä"), "invalid_name", "session_id"),
    (ask(session_id="a" * 129), "invalid_name", "1 to 128 characters"),
    (ask(turn_id="a b"), "invalid_name", "turn_id is 'a b'"),
    (sampling(temperature=-1), "invalid_sampling", r"temperature is -1: give a number in \[0, 100\]"),
    (sampling(temperature=float("nan")), "invalid_sampling", "temperature is nan"),
    (sampling(temperature=float("inf")), "invalid_sampling", "temperature is inf"),
    (sampling(top_p=0), "invalid_sampling", r"top_p is 0: give a number in \(0, 1\]"),
    (sampling(top_p=1.5), "invalid_sampling", "top_p is 1.5"),
    (sampling(top_p=float("nan")), "invalid_sampling", "top_p is nan"),
    (sampling(min_p=-0.1), "invalid_sampling", "min_p is -0.1"),
    (sampling(repetition_penalty=0), "invalid_sampling", "repetition_penalty is 0"),
    (sampling(top_logprobs=21), "invalid_sampling", "top_logprobs is 21"),
    (ask(stop=["x"] * 17), "invalid_request", "17 stop strings: at most 16"),
    (ask(stop=["x", ""]), "invalid_request", "stop string 2 has 0 characters"),
    (ask(stop=["x" * 257]), "invalid_request", "257 characters: give 1 to 256"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "code", "sentence"), BAD, ids=[f"{code}-{n}" for n, (_, code, _) in enumerate(BAD)]
)
def test_each_mistake_has_its_code_and_its_sentence(
    request_: chat_pb2.GenerateRequest, code: str, sentence: str
) -> None:
    with pytest.raises((BadRequest, EngineError), match=sentence) as refused:
        turn_request(request_)
    assert refused.value.code == code
    assert STATUS_OF[code] is grpc.StatusCode.INVALID_ARGUMENT
    assert "\n" not in str(refused.value)


def test_defaults_are_filled_in() -> None:
    filled = turn_request(sampling(temperature=0.8, seed=7)).sampling
    assert {field.name for field, _ in filled.ListFields()} == {f.name for f in filled.DESCRIPTOR.fields}
    assert (round(filled.temperature, 6), filled.seed, filled.top_p, filled.repetition_window) == (0.8, 7, 1.0, 64)


def test_equal_requests_have_equal_digests_and_others_do_not() -> None:
    base = turn_request(ask(stop=["a"], max_tokens=5)).digest
    assert turn_request(ask(stop=["a"], max_tokens=5, sampling=common_pb2.SamplingSettings(top_p=1))).digest == base
    others = [
        ask(stop=["b"], max_tokens=5),
        ask(max_tokens=5),
        ask(stop=["a"], max_tokens=6),
        ask(("user", "hello"), stop=["a"], max_tokens=5),
        ask(("user", "h"), ("user", "i"), stop=["a"], max_tokens=5),
        ask(stop=["a"], max_tokens=5, sampling=common_pb2.SamplingSettings(seed=1)),
    ]
    others += [
        ask(stop=["a"], max_tokens=5, **more)
        for more in (
            {"thinking": True},
            {"thinking": False},
            {"tools": [tool("a")]},
            {"tools": [tool("a")], "tool_choice": 1},
            {"format": chat_pb2.OutputFormat(regex="a")},
            {"format": chat_pb2.OutputFormat(json_schema="a")},
        )
    ]
    assert len({turn_request(r).digest for r in others} | {base}) == len(others) + 1


def test_arguments_may_be_nested_as_deep_as_it_says() -> None:
    deepest = '{"a":' * 64 + "1" + "}" * 64
    assert turn_request(said(role="assistant", tool_calls=[call("f", deepest)])).digest


def test_a_plain_request_has_the_digest_it_always_had() -> None:
    """Or a program that asks again after an upgrade would be told that its turn is another's."""
    assert turn_request(ask(stop=["a"], max_tokens=5)).digest == (
        "0dd0d24bb7fc6c944d622f3e4a5baebb25b2d7bebab288551de30f9a809b8287"
    )


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "contexts", "expected"),
    [
        (100, 50, [2048], 50),
        (100, 0, [2048], 1948),
        (100, 0, [2048, 512], 412),  # every node that can hold the prompt may take over
        (600, 0, [2048, 512], 1448),
        (100, 5000, [2048, 512], 1948),
        (2047, 0, [2048], 1),
    ],
)
def test_the_answer_fits_the_context(n_prompt: int, max_tokens: int, contexts: list[int], expected: int) -> None:
    assert answer_budget(n_prompt, max_tokens, contexts) == expected


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(BadRequest, match=r"the prompt has 2048 tokens .* the context holds 2048") as refused:
        answer_budget(2048, 1, [2048, 512])
    assert refused.value.code == "prompt_too_long"


def test_page_tokens_go_round_and_forged_ones_are_refused() -> None:
    key = PageKey(updated_at_ms=12345, session_id="a.b-c_d")
    assert page_key(page_token(key)) == key
    assert page_key("") is None
    for forged in ("x", "!!!!", "YWJj", page_token(PageKey(updated_at_ms=1, session_id="a/b")), "é"):
        with pytest.raises(BadRequest, match="page_token"):
            page_key(forged)
    assert (page_size(0), page_size(7), page_size(10**6)) == (100, 7, 1000)


def test_every_error_that_can_reach_a_caller_has_a_status() -> None:
    def below(cls: type[CoordinatorError]) -> set[type[CoordinatorError]]:
        return {cls}.union(*(below(sub) for sub in cls.__subclasses__()))

    from kvferry.coordinator.errors import CannotStart

    missing = {e.code for e in below(CoordinatorError) - below(CannotStart)} - set(STATUS_OF)
    assert missing == set()
