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
from kvferry.engine.reference import Images
from kvferry.engine.score import DEFAULT_CHUNK, score_reference, with_images
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
@click.option(
    "--image",
    "image_files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An image of the prompt (PNG, JPEG or WebP), in order; else IN may hold pixel_values and image_grid_thw.",
)
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
    image_files: tuple[Path, ...],
    greedy: int,
) -> None:
    """Run a model over given tokens and write what it computed.

    OUTPUT holds logits (float32 [S, vocab]), k and v (float32 [layers, S, kv_dim], the rows as attention uses them)
    and greedy_ids (int32 [N]). With images also image_embeds (float32 [image tokens, hidden]), deepstack (float32
    [features, image tokens, hidden]) and position_ids (int32 [3, S]). An image takes up as many image tokens in
    input_ids as it has, or one that is then expanded.
    """
    path = resolve_model(model)
    token_ids, images = _read_prompt(source)
    if image_files:
        token_ids, images = with_images(path, token_ids, [file.read_bytes() for file in image_files])
    if reference:
        result = score_reference(path, token_ids, images, n_greedy=greedy)
    else:
        result = score_tokens(
            path, token_ids, images, chunk=chunk, n_threads=threads, n_greedy=greedy, quant=quant, kv=KvKind(kv)
        )
    tensors = {"logits": result.logits, "k": result.k, "v": result.v, "greedy_ids": result.greedy_ids}
    if result.images is not None:
        tensors |= {
            "image_embeds": result.images.embeds,
            "deepstack": result.images.deepstack,
            "position_ids": result.images.position_ids,
        }
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, output)


def _read_prompt(source: Path) -> tuple[NDArray[np.int32], Images | None]:
    """The tokens, and the images' patches where the file holds them."""
    try:
        tensors = load_file(source)
    except (OSError, SafetensorError) as error:
        raise InvalidTokens(f"{source} cannot be read as a safetensors file: {error}") from error
    token_ids = tensors.get("input_ids")
    if token_ids is None or token_ids.dtype != np.int32 or token_ids.ndim != 1 or len(token_ids) == 0:
        raise InvalidTokens(f"{source} must hold input_ids, a non-empty int32 [S]")
    pixels, grids = tensors.get("pixel_values"), tensors.get("image_grid_thw")
    if (pixels is None) != (grids is None):
        raise InvalidTokens(f"{source} must hold pixel_values and image_grid_thw together")
    if pixels is None or grids is None:
        return token_ids, None
    if pixels.dtype != np.float32 or pixels.ndim != 2 or grids.dtype not in (np.int32, np.int64):
        raise InvalidTokens(f"{source}: pixel_values must be float32 [patches, elements], image_grid_thw integers")
    return token_ids, Images(pixels, grids)
