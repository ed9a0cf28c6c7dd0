"""A session on its way to another cluster: made of the registry's records, and checked before it becomes some. Pure.

Nothing that comes in is believed: token ids are held against the vocabulary, pictures against their hashes, messages
and settings against what a request may have; the text of an answer is made anew of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from kvferry.coordinator.answer_parts import call_message
from kvferry.coordinator.conversation import ModelAnswerText
from kvferry.coordinator.errors import BadRequest, ImagesTooLarge, InvalidImport
from kvferry.coordinator.form_requests import checked_tools
from kvferry.coordinator.models import ServedModel
from kvferry.coordinator.pictures import MAX_SESSION_BYTES
from kvferry.coordinator.registry import (
    AnswerForm,
    FinishReason,
    Message,
    Picture,
    SessionRecord,
    TokenArray,
    TurnOutcome,
    TurnRecord,
)
from kvferry.coordinator.requests import checked_messages, checked_sampling, checked_stops, name
from kvferry.engine.config import VisionConfig
from kvferry.engine.errors import EngineError, InvalidImage
from kvferry.engine.vision.positions import Grid
from kvferry.engine.vision.preprocess import content_hash, decode_image, unpack_pixels
from kvferry.proto.channel import MAX_MESSAGE_BYTES
from kvferry.proto.v1 import chat_pb2, common_pb2, worker_pb2

MAX_TURNS: Final = 10_000
MAX_EXPORT_BYTES: Final = MAX_MESSAGE_BYTES - 4_096
"""With what is around it, it has to fit into a message."""

KEPT: Final = frozenset(int(reason) for reason in FinishReason if reason is not FinishReason.ERROR)


def exported(
    session: SessionRecord, turns: Iterable[TurnRecord], pixels: Mapping[str, bytes]
) -> chat_pb2.ExportedSession:
    """The session with its kept turns. ``pixels``: PNG files by content hash.

    Raises BadRequest for one that no message can carry, even without its log-probabilities.
    """
    kept = [exported_turn(turn, turn.outcome) for turn in turns if turn.outcome is not None and turn.outcome.kept]
    message = chat_pb2.ExportedSession(
        session_id=session.session_id, model=session.model, tokenizer_digest=session.tokenizer_digest,
        created_at_ms=session.created_at_ms, updated_at_ms=session.updated_at_ms, epoch=session.epoch,
        tenant=session.tenant, turns=kept, pixels=[pixels[content] for content in sorted(pixels)],
    )  # fmt: skip
    if message.ByteSize() > MAX_EXPORT_BYTES:
        for turn in message.turns:
            turn.ClearField("logprobs")
    if (n_bytes := message.ByteSize()) > MAX_EXPORT_BYTES:
        raise BadRequest(
            f"session {session.session_id} has {n_bytes:,} bytes, and one that is exported may have "
            f"{MAX_EXPORT_BYTES:,}: fork it with fewer turns, and export the fork"
        )
    return message


def exported_turn(turn: TurnRecord, outcome: TurnOutcome) -> chat_pb2.ExportedTurn:
    message = chat_pb2.ExportedTurn(
        turn_id=turn.turn_id,
        messages=[exported_message(message) for message in turn.messages],
        prompt_ids=turn.prompt_ids.tolist(),
        answer_ids=outcome.answer_ids.tolist(),
        finish_reason=common_pb2.FinishReason.ValueType(outcome.reason),
        sampling=common_pb2.SamplingSettings.FromString(turn.sampling),
        max_tokens=turn.max_tokens,
        stop=turn.stop,
        created_at_ms=turn.created_at_ms,
        digest=turn.digest,
        tools=[chat_pb2.Tool(name=t.name, description=t.description, parameters=t.parameters) for t in turn.form.tools],
        thinking=turn.form.thinking,
        prompt_opened_thinking=turn.form.prompt_opened_thinking,
        reads_thinking=turn.form.reads_thinking,
        logprobs=worker_pb2.GeneratedTokens.FromString(outcome.logprobs).tokens,
    )
    for p in turn.pictures:
        message.pictures.add(
            content_hash=bytes.fromhex(p.content_hash), message=p.message, at=p.at, start=p.start,
            n_tokens=p.n_tokens, rows=p.rows, cols=p.cols,
        )  # fmt: skip
    return message


def exported_message(message: Message) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(
        role=message.role, content=message.content, reasoning=message.reasoning,
        tool_calls=[call_message(call) for call in message.tool_calls], tool_call_id=message.tool_call_id,
    )  # fmt: skip


def imported(
    message: chat_pb2.ExportedSession, model: ServedModel, session_id: str, now_ms: int
) -> tuple[SessionRecord, list[TurnRecord], dict[str, bytes]]:
    """The session under this name, its turns, and its pixels by content hash.

    Raises InvalidName, InvalidImport, and with it what is wrong with a part.
    """
    name("session_id", session_id)
    if len(message.turns) > MAX_TURNS:
        raise InvalidImport(f"the session has {len(message.turns)} turns: at most {MAX_TURNS} can be imported")
    pixels = checked_pixels(message.pixels)
    turns: list[TurnRecord] = []
    n_history = 0
    for number, carried in enumerate(message.turns, start=1):
        try:
            turn = imported_turn(carried, model, session_id, n_history, pixels)
        except (BadRequest, EngineError) as error:
            raise InvalidImport(f"turn {number} of the session cannot be imported: {error}") from error
        turns.append(turn)
        n_history += len(carried.prompt_ids) + len(carried.answer_ids)
        if n_history > model.context_length:
            raise InvalidImport(
                f"the session has more than {model.context_length} tokens, which is all that {model.name} can look at"
            )
    if len({turn.turn_id for turn in turns}) != len(turns):
        raise InvalidImport("two turns of the session have one id")
    if len({bool(turn.messages) for turn in turns}) > 1:
        raise InvalidImport("some of its turns have messages and some have raw prompts")
    if any(message.role == "system" for turn in turns[1:] for message in turn.messages[:1]):
        raise InvalidImport("only the first message of a session may have the role system")
    used = {p.content_hash for turn in turns for p in turn.pictures}
    return (
        SessionRecord(
            session_id=session_id,
            model=model.name,
            tokenizer_digest=model.text.digest,
            created_at_ms=min(max(0, message.created_at_ms), now_ms),
            updated_at_ms=now_ms,
            # A node that knew the session in an earlier life must not take it for an old one.
            epoch=min(message.epoch, 2**62),
            n_tokens=n_history,
            n_turns=len(turns),
            tenant=name("tenant", message.tenant) if message.tenant else "",
        ),
        turns,
        {content: png for content, png in pixels.items() if content in used},
    )


def imported_turn(
    carried: chat_pb2.ExportedTurn, model: ServedModel, session_id: str, n_history: int, pixels: Mapping[str, bytes]
) -> TurnRecord:
    """Raises InvalidImport, and what the checks of requests raise."""
    is_raw = not (carried.messages or carried.tools or carried.reads_thinking)
    messages = () if is_raw else checked_messages(carried.messages)
    if any(message.images for message in carried.messages):
        raise InvalidImport("its messages have images in them, which belong beside them")
    prompt_ids, answer_ids = checked_ids(carried.prompt_ids, model), checked_ids(carried.answer_ids, model)
    if not len(prompt_ids):
        raise InvalidImport("its prompt has no tokens")
    if carried.finish_reason not in KEPT:
        raise InvalidImport(f"its finish reason is {carried.finish_reason}, with which no turn is kept")
    if carried.max_tokens < 1 or len(answer_ids) > carried.max_tokens:
        raise InvalidImport(f"its answer has {len(answer_ids)} tokens and was allowed {carried.max_tokens}")
    reason, stop = FinishReason(carried.finish_reason), checked_stops(carried.stop)
    indexes = [token.index for token in carried.logprobs]
    if indexes != sorted(set(indexes)) or any(index >= len(answer_ids) for index in indexes):
        raise InvalidImport("its log-probabilities are not those of its answer")
    return TurnRecord(
        session_id=session_id,
        turn_id=name("turn_id", carried.turn_id),
        messages=messages,
        n_history_tokens=n_history,
        prompt_ids=prompt_ids,
        sampling=checked_sampling(carried.sampling).SerializeToString(deterministic=True),
        max_tokens=carried.max_tokens,
        stop=stop,
        digest=carried.digest[:64],
        created_at_ms=max(0, carried.created_at_ms),
        outcome=TurnOutcome(
            reason=reason,
            answer_ids=answer_ids,
            answer_text=answer_text(model, stop, answer_ids, reason),
            logprobs=worker_pb2.GeneratedTokens(tokens=carried.logprobs).SerializeToString(),
        ),
        form=AnswerForm(
            tools=checked_tools(carried.tools),
            thinking=carried.thinking if carried.HasField("thinking") else None,
            prompt_opened_thinking=carried.prompt_opened_thinking,
            reads_thinking=carried.reads_thinking,
        ),
        pictures=checked_pictures(carried, messages, prompt_ids, model.preparation.reader.vision, n_history, pixels),
    )


def checked_ids(token_ids: Sequence[int], model: ServedModel) -> TokenArray:
    """Int32 [n]. Raises InvalidImport."""
    ids = np.array(token_ids, dtype=np.int32)
    if len(ids) and not 0 <= ids.min() <= ids.max() < model.text.vocab_size:
        raise InvalidImport(f"a token lies outside the vocabulary of {model.text.vocab_size}")
    return ids


def answer_text(model: ServedModel, stop: Sequence[str], answer_ids: TokenArray, reason: FinishReason) -> str:
    """What a reader of these tokens has seen."""
    text = ModelAnswerText(model.text, stop)
    pieces = [text.push(token_id)[0] for token_id in answer_ids.tolist() if token_id not in model.text.end_token_ids]
    return "".join(pieces) + ("" if reason is FinishReason.STOP_STRING else text.flush())


def checked_pixels(files: Sequence[bytes]) -> dict[str, bytes]:
    """PNG files by the hash of what is in them. Raises InvalidImport, ImagesTooLarge, InvalidImage."""
    if sum(map(len, files)) > MAX_SESSION_BYTES:
        raise ImagesTooLarge(f"the session's images have more than {MAX_SESSION_BYTES >> 20} MiB")
    try:
        return {content_hash(np.asarray(decode_image(png))).hex(): png for png in files}
    except InvalidImage as error:
        raise InvalidImport(f"an image of the session cannot be read: {error}") from error


def checked_pictures(
    carried: chat_pb2.ExportedTurn, messages: Sequence[Message], prompt_ids: TokenArray, vision: VisionConfig | None,
    n_history: int, pixels: Mapping[str, bytes],
) -> tuple[Picture, ...]:  # fmt: skip
    """Raises InvalidImport, InvalidImage."""
    if vision is None:
        if carried.pictures:
            raise InvalidImport("it has images, and the model takes none")
        return ()
    places = np.zeros(len(prompt_ids), bool)
    found = []
    for p in carried.pictures:
        first, content = p.start - n_history, p.content_hash.hex()
        grid = Grid(1, p.rows, p.cols)
        if p.message >= len(messages) or messages[p.message].role != "user":
            raise InvalidImport("an image belongs to no message of the user")
        if p.at > len(messages[p.message].content) or content not in pixels:
            raise InvalidImport("an image has no place in its message, or no pixels")
        if not 0 <= first < first + p.n_tokens <= len(prompt_ids) or grid.n_tokens(vision.merge_size) != p.n_tokens:
            raise InvalidImport("an image's tokens are not where it says")
        unpack_pixels(pixels[content], grid, p.content_hash, vision)
        places[first : first + p.n_tokens] = True
        found.append(
            Picture(
                content_hash=content, message=p.message, at=p.at, start=p.start, rows=p.rows, cols=p.cols,
                n_tokens=p.n_tokens, width=p.cols * vision.patch_size, height=p.rows * vision.patch_size,
                n_bytes=len(pixels[content]),
            )
        )  # fmt: skip
    if not np.array_equal(places, prompt_ids == vision.image_token_id):
        raise InvalidImport("its image tokens are not those of its images")
    return tuple(found)
