"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.answering import Shape, answer
from kvferry.gateway.asking import Order
from kvferry.gateway.body import read_body
from kvferry.gateway.chat_request import ChatRequest
from kvferry.gateway.choices import ChatChoice
from kvferry.gateway.context import context_of
from kvferry.gateway.messages import messages_of


async def chat_completions(request: Request) -> Response:
    """Whole, or as a stream that may be picked up again with Last-Event-ID. Raises ApiError and ClientError."""
    context = context_of(request)
    asked = await read_body(request, ChatRequest)
    asked.check()
    order = Order(
        prompts=[messages_of(asked.messages)],
        n=asked.n,
        model=await context.models.find(asked.model),
        sampling=asked.sampling(context.new_seed, logprobs=asked.logprobs, top_logprobs=asked.top_logprobs),
        max_tokens=asked.n_tokens_at_most,
        stop=asked.stops,
        form=asked.form(),
    )
    shape = Shape(
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
        id_prefix="chatcmpl-",
        new_choice=partial(ChatChoice, with_logprobs=asked.logprobs),
    )
    return await answer(request, context, order, shape, stream=asked.stream, wants_usage=asked.wants_usage)
