"""What a node is asked for: a turn's record as the message that begins it there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvferry.coordinator.conversation import TextSide
from kvferry.coordinator.registry import Picture, Registry, TokenArray, TurnRecord
from kvferry.proto.v1 import common_pb2, worker_pb2


def run_request(
    record: TurnRecord, registry: Registry, model: TextSide, *, epoch: int, token_ids: TokenArray,
    images: Sequence[worker_pb2.PromptImage], namespace: str, recompute: bool,
) -> worker_pb2.RunTurnRequest:  # fmt: skip
    """``token_ids``, int32 [n]: the session's, this turn's prompt, and its answer so far."""
    return worker_pb2.RunTurnRequest(
        session_id=record.session_id,
        turn_id=record.turn_id,
        epoch=epoch,
        coordinator_generation=registry.generation,
        coordinator_instance=registry.instance_id,
        token_ids=token_ids.tolist(),
        n_prompt_tokens=record.n_prompt_tokens,
        sampling=common_pb2.SamplingSettings.FromString(record.sampling),
        max_tokens=record.max_tokens,
        priority=record.priority,
        end_token_ids=model.end_token_ids,
        recompute=recompute,
        grammar=record.form.grammar,
        images=images,
        namespace=namespace,
    )


def prompt_images(pictures: Iterable[Picture], pixels: Mapping[str, bytes]) -> list[worker_pb2.PromptImage]:
    """In order; each content's pixels, by its hash, go with the first image that has it."""
    left = dict(pixels)
    return [
        worker_pb2.PromptImage(
            content_hash=bytes.fromhex(picture.content_hash),
            start=picture.start,
            grid_rows=picture.rows,
            grid_cols=picture.cols,
            pixels=left.pop(picture.content_hash, b""),
        )
        for picture in pictures
    ]
