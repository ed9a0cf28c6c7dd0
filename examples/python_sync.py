"""The gRPC service from Python, with nothing but the generated stubs: `python examples/python_sync.py [HOST:PORT]`.

Streams an answer, hangs up in the middle, goes on from the next token, and ends another answer by a deadline.
`kvferry.client.Client` does all of this by itself; this is what it does, for whoever writes a client.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterable

import grpc

from kvferry.proto.channel import channel_options
from kvferry.proto.v1 import chat_pb2, common_pb2
from kvferry.proto.v1.chat_pb2_grpc import ChatServiceStub

HANG_UP_AFTER = 10


def main(address: str) -> None:
    """One session, two turns."""
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        chat = ChatServiceStub(channel)
        session_id = chat.CreateSession(chat_pb2.CreateSessionRequest(), timeout=10).session.session_id
        reconnect(chat, session_id)
        deadline(chat, session_id)


def reconnect(chat: ChatServiceStub, session_id: str) -> None:
    """A lost connection loses nothing: the turn goes on without a reader, and Resume streams it from any token on."""
    request = a_turn(session_id, "Tell me a long story about a ferry.", max_tokens=40)
    stream = chat.Generate(request)
    seen = read((response.event for response in stream), expected=0, stop_at=HANG_UP_AFTER)
    stream.cancel()
    print(f"\n[hung up after {seen} tokens]")
    resumed = chat.Resume(
        chat_pb2.ResumeRequest(session_id=session_id, turn_id=request.turn_id, from_index=seen), timeout=60
    )
    seen = read((response.event for response in resumed), expected=seen)
    print(f"\n[{seen} tokens, each of them once]")


def deadline(chat: ChatServiceStub, session_id: str) -> None:
    """The deadline of the call ends the answer with the tokens that it has; the session keeps them."""
    request = a_turn(session_id, "Now a very long one about the sea.", max_tokens=400)
    try:
        read((response.event for response in chat.Generate(request, timeout=1.0)), expected=0)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    *_, last = chat.Resume(chat_pb2.ResumeRequest(session_id=session_id, turn_id=request.turn_id), timeout=60)
    reason = common_pb2.FinishReason.Name(last.event.finished.reason)
    print(f"\n[the second answer ended with {reason} after {last.event.finished.n_answer_tokens} tokens]")


def a_turn(session_id: str, text: str, max_tokens: int) -> chat_pb2.GenerateRequest:
    """The turn's name is ours: asking again with the same one never starts a second turn."""
    return chat_pb2.GenerateRequest(
        session_id=session_id,
        turn_id=str(uuid.uuid4()),
        messages=[chat_pb2.ChatMessage(role="user", content=text)],
        max_tokens=max_tokens,
    )


def read(events: Iterable[chat_pb2.TurnEvent], expected: int, stop_at: int | None = None) -> int:
    """Prints the tokens from index ``expected`` on; how many the answer has now."""
    for event in events:
        if event.HasField("token"):
            if event.sequence != expected:
                sys.exit(f"token {event.sequence} came instead of {expected}")
            print(event.token.text, end="", flush=True)
            expected += 1
            if expected == stop_at:
                break
    return expected


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7070")
