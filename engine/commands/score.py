"""`kvferry score`: a ruler for the engine."""

from __future__ import annotations

from pathlib import Path

import click

from kvferry.engine.commands.score_files import check_output, read_prompt, write_score
from kvferry.engine.errors import InvalidImage, OutOfResources
from kvferry.engine.files.open_model import open_model
from kvferry.engine.files.regular import fault_of
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.kv_cache import KvKind
from kvferry.engine.packing import Quant
from kvferry.engine.score import DEFAULT_CHUNK, check_request, score_reference, with_images
from kvferry.engine.score import score as score_tokens
from kvferry.engine.threads import MAX_THREADS
from kvferry.engine.vision.preprocess import IMAGE_BYTES_MAX
from kvferry.engine.weights import WeightsMode
from kvferry.terminal.completing import completes


@click.command(epilog="Example: kvferry score --model smollm2-135m --input ids.npz --output scores.npz")
@click.option(
    "--model",
    required=True,
    shell_complete=completes("models"),
    metavar="M",
    help="A fetched name, a GGUF file or a model folder.",
)
@click.option("--input", "source", required=True, type=click.Path(path_type=Path), help="Holds input_ids (int32 [S]).")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Gets logits, k, v and greedy_ids.")
@click.option("--chunk", default=DEFAULT_CHUNK, type=click.IntRange(1), help="Tokens per step of the engine.")
@click.option("--threads", default=1, type=click.IntRange(1, MAX_THREADS), help="Threads of the engine.")
@click.option(
    "--kv", default="f32", type=click.Choice([kind.value for kind in KvKind]), help="What the KV cache stores."
)
@click.option("--quant", default="q8", type=click.Choice(["q8", "q4"]), help="What float weights become.")
@click.option(
    "--weights",
    default="auto",
    type=click.Choice(["auto", "memory", "mmap", "stream"]),
    help="Where packed weights lie: own memory, shared pages, or pages dropped after use.",
)
@click.option("--reference", is_flag=True, help="Run the slow float path instead of the engine.")
@click.option(
    "--image",
    "image_files",
    multiple=True,
    type=click.Path(path_type=Path),
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
    weights: WeightsMode,
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
    token_ids, images = read_prompt(source)
    if image_files:
        token_ids, images = with_images(path, token_ids, [_read_image(file) for file in image_files])
    n_bytes = check_request(open_model(path).config, token_ids, images, n_greedy=greedy)
    check_output(output, n_bytes)
    try:
        if reference:
            result = score_reference(path, token_ids, images, n_greedy=greedy)
        else:
            result = score_tokens(
                path,
                token_ids,
                images,
                chunk=chunk,
                n_threads=threads,
                n_greedy=greedy,
                quant=quant,
                kv=KvKind(kv),
                weights=weights,
            )
        write_score(result, output)
    except MemoryError as error:
        raise OutOfResources(
            f"there is not enough memory for the model and the {n_bytes} bytes of logits and rows of {len(token_ids)} "
            "tokens; give fewer tokens"
        ) from error


def _read_image(path: Path) -> bytes:
    fault = fault_of(path)
    if fault is not None:
        raise InvalidImage(f"{path} {fault}")
    if path.stat().st_size > IMAGE_BYTES_MAX:
        raise InvalidImage(f"{path} has {path.stat().st_size} bytes, more than the limit of {IMAGE_BYTES_MAX}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidImage(f"{path} cannot be read ({error.strerror})") from error
