"""`kvferry score`: a ruler for the engine."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from kvferry.engine.errors import InvalidTokens
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.kv_cache import KvKind
from kvferry.engine.packing import Quant
from kvferry.engine.score import DEFAULT_CHUNK, score_reference
from kvferry.engine.score import score as score_tokens


@click.command()
@click.option("--model", required=True, metavar="M", help="A fetched name, a GGUF file or a model folder.")
@click.option("--input", "source", required=True, type=click.Path(path_type=Path), help="Holds input_ids (int32 [S]).")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Gets logits, k, v and greedy_ids.")
@click.option("--chunk", default=DEFAULT_CHUNK, type=click.IntRange(1), help="Tokens per step of the engine.")
@click.option("--threads", default=1, type=click.IntRange(1), help="Threads of the engine.")
@click.option(
    "--kv", default="f32", type=click.Choice([kind.value for kind in KvKind]), help="What the KV cache stores."
)
@click.option("--quant", default="q8", type=click.Choice(["q8", "q4"]), help="What float weights become.")
@click.option("--reference", is_flag=True, help="Run the slow float path instead of the engine.")
@click.option("--greedy", default=0, type=click.IntRange(0), help="Tokens to continue with, largest logit first.")
def score(
    *,
    model: str,
    source: Path,
    output: Path,
    chunk: int,
    threads: int,
    kv: str,
    quant: Quant,
    reference: bool,
    greedy: int,
) -> None:
    """Run a model over given tokens and write what it computed.

    OUTPUT holds logits (float32 [S, vocab]), k and v (float32 [layers, S, kv_dim], the rows as attention uses them)
    and greedy_ids (int32 [N]).
    """
    path = resolve_model(model)
    token_ids = _read_tokens(source)
    if reference:
        result = score_reference(path, token_ids, n_greedy=greedy)
    else:
        result = score_tokens(
            path, token_ids, chunk=chunk, n_threads=threads, n_greedy=greedy, quant=quant, kv=KvKind(kv)
        )
    tensors = {"logits": result.logits, "k": result.k, "v": result.v, "greedy_ids": result.greedy_ids}
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, output)


def _read_tokens(source: Path) -> NDArray[np.int32]:
    try:
        tensors = load_file(source)
    except (OSError, SafetensorError) as error:
        raise InvalidTokens(f"{source} cannot be read as a safetensors file: {error}") from error
    token_ids = tensors.get("input_ids")
    if token_ids is None or token_ids.dtype != np.int32 or token_ids.ndim != 1 or len(token_ids) == 0:
        raise InvalidTokens(f"{source} must hold input_ids, a non-empty int32 [S]")
    return token_ids
