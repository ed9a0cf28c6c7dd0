"""The gRPC service from asyncio, with nothing but the generated stubs: `python examples/python_asyncio.py [HOST:PORT]`.

Two answers stream side by side; each hangs up in the middle and goes on from its next token; a third one is ended by a
deadline. `kvferry.client.AsyncClient` does all of this by itself; this is what it does, for whoever writes a client.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING

import grpc.aio

from kvferry.proto.channel import channel_options
from kvferry.proto.v1 import chat_pb2, common_pb2
from kvferry.proto.v1.chat_pb2_grpc import ChatServiceStub

if TYPE_CHECKING:
    from kvferry.proto.v1.chat_pb2_grpc import ChatServiceAsyncStub

HANG_UP_AFTER = 10


async def main(address: str) -> None:
    """Two sessions at a time, then one more turn of the first."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        chat: ChatServiceAsyncStub = ChatServiceStub(channel)
        sessions = [
            (await chat.CreateSession(chat_pb2.CreateSessionRequest(), timeout=10)).session.session_id for _ in range(2)
        ]
        subjects = ("a ferry", "a lighthouse")
        for line in await asyncio.gather(*map(reconnect, (chat, chat), sessions, subjects)):
            print(line)
        print(await deadline(chat, sessions[0]))


async def reconnect(chat: ChatServiceAsyncStub, session_id: str, subject: str) -> str:
    """A lost connection loses nothing: the turn goes on without a reader, and Resume streams it from any token on."""
    request = a_turn(session_id, f"Tell me a long story about {subject}.", max_tokens=40)
    tokens: list[str] = []
    stream = chat.Generate(request)
    await read(stream, tokens, stop_at=HANG_UP_AFTER)
    stream.cancel()
    n_before = len(tokens)
    resumed = chat.Resume(
        chat_pb2.ResumeRequest(session_id=session_id, turn_id=request.turn_id, from_index=n_before), timeout=60
    )
    await read(resumed, tokens)
    text = "".join(tokens)
    return f"{text}\n[{subject}: hung up after {n_before} tokens; {len(tokens)} tokens, each of them once]"


async def deadline(chat: ChatServiceAsyncStub, session_id: str) -> str:
    """The deadline of the call ends the answer with the tokens that it has; the session keeps them."""
    request = a_turn(session_id, "Now a very long one about the sea.", max_tokens=400)
    try:
        await read(chat.Generate(request, timeout=1.0), [])
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    resume = chat_pb2.ResumeRequest(session_id=session_id, turn_id=request.turn_id)
    last = [response.event async for response in chat.Resume(resume, timeout=60)][-1].finished
    reason = common_pb2.FinishReason.Name(last.reason)
    return f"[the third answer ended with {reason} after {last.n_answer_tokens} tokens]"


def a_turn(session_id: str, text: str, max_tokens: int) -> chat_pb2.GenerateRequest:
    """The turn's name is ours: asking again with the same one never starts a second turn."""
    return chat_pb2.GenerateRequest(
        session_id=session_id,
        turn_id=str(uuid.uuid4()),
        messages=[chat_pb2.ChatMessage(role="user", content=text)],
        max_tokens=max_tokens,
    )


async def read(
    stream: AsyncIterable[chat_pb2.GenerateResponse] | AsyncIterable[chat_pb2.ResumeResponse],
    tokens: list[str],
    stop_at: int | None = None,
) -> None:
    """Appends the texts of the tokens that follow those there are."""
    async for response in stream:
        if response.event.HasField("token"):
            sequence = response.event.sequence
            if sequence != len(tokens):
                sys.exit(f"token {sequence} came instead of {len(tokens)}")
            tokens.append(response.event.token.text)
            if len(tokens) == stop_at:
                return


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7070"))
