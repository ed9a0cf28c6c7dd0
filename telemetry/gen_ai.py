"""A turn in the words of OpenTelemetry's semantic conventions for generative AI (gen_ai.*), without its texts.

The names are written out, so that nothing of OpenTelemetry is needed while traces are off; a test compares them.
"""

from __future__ import annotations

from typing import Final

from kvferry.proto.v1 import common_pb2
from kvferry.telemetry.tracing import Attributes

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
MODEL: Final = "gen_ai.request.model"
CONVERSATION: Final = "gen_ai.conversation.id"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
SEED: Final = "gen_ai.request.seed"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"

SETTINGS: Final = {
    "temperature": "gen_ai.request.temperature",
    "top_k": "gen_ai.request.top_k",
    "top_p": "gen_ai.request.top_p",
    "seed": SEED,
}
"""Fields of SamplingSettings."""

TURN: Final = "kvferry.turn.id"
NODE: Final = "kvferry.node.id"
EPOCH: Final = "kvferry.epoch"


def of_request(
    session_id: str, turn_id: str, sampling: common_pb2.SamplingSettings, max_tokens: int, model: str = ""
) -> Attributes:
    """What is known when a turn begins. Settings that are not given are not there."""
    given = {name: getattr(sampling, field) for field, name in SETTINGS.items() if sampling.HasField(field)}  # type: ignore[arg-type]
    return {
        OPERATION: "chat",
        PROVIDER: "kvferry",
        CONVERSATION: session_id,
        TURN: turn_id,
        **({MODEL: model} if model else {}),
        **({MAX_TOKENS: max_tokens} if max_tokens else {}),
        **given,
    }


def of_answer(n_input: int, n_output: int, reasons: list[str], first_token_seconds: float = 0.0) -> Attributes:
    """What is known when it ends. ``reasons``: one for each answer, in lower case, as FinishReason has them."""
    return {
        INPUT_TOKENS: n_input,
        OUTPUT_TOKENS: n_output,
        FINISH_REASONS: reasons,
        **({FIRST_CHUNK: first_token_seconds} if first_token_seconds else {}),
    }
