"""What people use of an agent framework, through its own code for OpenAI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
from compat_python import STORY, Case
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class River(BaseModel):
    """A river."""

    name: str
    is_long: bool


class Agents:
    """Makes them. One event loop and one client for each check: the framework's own are closed by nobody."""

    def __init__(self, client: openai.AsyncOpenAI, failover: Any) -> None:
        self.provider, self.failover = OpenAIProvider(openai_client=client), failover

    def __call__(self, *, kind: Any = OpenAIChatModel, max_tokens: int = 16, **fields: Any) -> Agent[Any, Any]:
        settings: Any = {"temperature": 0.0, "max_tokens": max_tokens}
        return Agent(kind("any", provider=self.provider), **({"model_settings": settings} | fields))


async def streamed(agent: Agent[Any, Any], prompt: str) -> str:
    async with agent.run_stream(prompt) as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


async def check_chat(agents: Agents) -> None:
    assert (await agents().run("Name a river.")).output


async def check_chat_stream(agents: Agents) -> None:
    assert await streamed(agents(), "Name a river.") == (await agents().run("Name a river.")).output


async def check_chat_usage(agents: Agents) -> None:
    prompt = "The ferry crosses the wide and quiet river each evening. " * 12
    await agents().run(prompt)
    usage = (await agents().run(prompt)).usage
    assert usage.output_tokens == 16
    assert usage.cache_read_tokens > 0.8 * usage.input_tokens - 32


async def check_chat_schema(agents: Agents) -> None:
    agent = agents(output_type=NativeOutput(River), max_tokens=200)
    assert isinstance((await agent.run("Name a river.")).output, River)


async def check_chat_tools(agents: Agents) -> None:
    agent = agents(output_type=ToolOutput(River), max_tokens=200)
    assert isinstance((await agent.run("Name a river.")).output, River)


async def check_chat_tool_loop(agents: Agents) -> None:
    called: list[str] = []

    def settings(_: Any) -> Any:
        return {"temperature": 0.0, "max_tokens": 40, "tool_choice": "none" if called else "required"}

    agent = agents(model_settings=settings)

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        called.append(city)
        return "sunny"

    result = await agent.run("What is the weather in Oslo, and which river is there?")
    assert len(called) == 1
    assert result.output


async def check_chat_failover(agents: Agents) -> None:
    whole = (await agents(max_tokens=120).run(STORY)).output
    with agents.failover():
        assert await streamed(agents(max_tokens=120), STORY) == whole


async def check_response(agents: Agents) -> None:
    agent = agents(kind=OpenAIResponsesModel)
    assert (await agent.run("Name a river.")).output == await streamed(agent, "Name a river.")


def run(check: Callable[[Agents], Awaitable[None]], case: Case) -> None:
    """One check."""

    async def running() -> None:
        url = str(case.client.base_url)
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            await check(Agents(client, case.failover))

    asyncio.run(running())


CHECKS = {name.removeprefix("check_"): check for name, check in dict(globals()).items() if name.startswith("check_")}
