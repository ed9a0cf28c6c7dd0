"""A reader that does not read delays nobody, and loses nothing itself."""

from __future__ import annotations

import grpc
import pytest

from kvferry.client.sdk import Client, Sampling
from kvferry.drills.conversation import TurnRequest, hold_turn
from kvferry.proto.channel import channel_options
from kvferry.proto.v1 import chat_pb2, chat_pb2_grpc, common_pb2

from .rig import question

pytestmark = pytest.mark.alone  # a cluster of three nodes, and what it does within a lease

N_TOKENS = 400
BUFFER_BYTES = 64 * 1024
"""What HTTP/2 lets a server send before the reader reads; the stream below is several times as long."""


def test_a_slow_reader_does_not_slow_another_stream(cluster, control):
    request = TurnRequest(question(9).text, N_TOKENS, Sampling(temperature=1.0, seed=9))
    with (
        grpc.insecure_channel(cluster.address, options=channel_options()) as channel,
        Client(cluster.address) as client,
    ):
        slow_session, session = client.create_session(), client.create_session()
        stub = chat_pb2_grpc.ChatServiceStub(channel)
        stream = stub.Generate(
            chat_pb2.GenerateRequest(
                session_id=slow_session.id,
                turn_id="slow",
                messages=[chat_pb2.ChatMessage(role="user", content=request.text)],
                sampling=common_pb2.SamplingSettings(temperature=1.0, seed=9, logprobs=True, top_logprobs=20),
                max_tokens=N_TOKENS,
            )
        )
        first = next(stream)  # and then no more, for now
        log = hold_turn(session, question(10))
        control.assert_same([question(10)], [log.record], session)
        while client.session(slow_session.id).details().session.open_turn_id:
            pass  # its turn ends although nobody reads it
        events = [first.event, *(message.event for message in stream)]
        tokens = [event for event in events if event.HasField("token")]
        assert sum(event.ByteSize() for event in events) > 2 * BUFFER_BYTES
        assert [event.sequence for event in tokens] == list(range(len(tokens)))
        assert tuple(event.token.token_id for event in tokens) == tuple(
            token.token_id for token in control.answer(request).received
        )
        assert all(len(event.token.top_logprobs) == 20 for event in tokens)
