"""The files of `kvferry score`: what it reads a prompt from, and what it writes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save, save_file

from kvferry.engine.errors import InvalidTokens, OutputUnwritable
from kvferry.engine.files.publish import TEMP_PREFIX
from kvferry.engine.files.regular import NOT_THERE, exists, fault_of
from kvferry.engine.reference import Images
from kvferry.engine.score import Score
from kvferry.terminal.output_file import PRIVATE_MODE, is_stream, output_file, staged_path

_HEADER_BYTES: Final = 1 << 12  # of seven tensors, generously


def read_prompt(source: Path) -> tuple[NDArray[np.int32], Images | None]:
    """The tokens, and the images' patches where the file holds them; other tensors in it are not looked at.

    Raises InvalidTokens.
    """
    fault = fault_of(source)
    if fault is not None:
        raise InvalidTokens(f"{source} {fault}")
    try:
        with safe_open(source, framework="np") as file:
            token_ids = _tensor(source, file, "input_ids", ("I32",), 1)
            pixels = _tensor(source, file, "pixel_values", ("F32",), 2)
            grids = _tensor(source, file, "image_grid_thw", ("I32", "I64"), 2)
    except (OSError, SafetensorError) as error:
        raise InvalidTokens(f"{source} cannot be read as a safetensors file: {error}") from error
    if token_ids is None or len(token_ids) == 0:
        raise InvalidTokens(f"{source} must hold input_ids, a non-empty int32 [S]")
    if (pixels is None) != (grids is None):
        raise InvalidTokens(f"{source} must hold pixel_values and image_grid_thw together")
    if pixels is None or grids is None:
        return token_ids, None
    return token_ids, Images(pixels, grids)


def _tensor(source: Path, file: Any, name: str, dtypes: tuple[str, ...], n_dims: int) -> NDArray[Any] | None:
    """A tensor of the file; its type is looked at first, since numpy has not all that the format has."""
    if name not in file.keys():  # noqa: SIM118 - not a mapping
        return None
    stored = file.get_slice(name)
    dtype, shape = stored.get_dtype(), stored.get_shape()
    if dtype not in dtypes or len(shape) != n_dims:
        expected = f"{' or '.join(dtypes)} in {n_dims} dimension{'s' if n_dims > 1 else ''}"
        raise InvalidTokens(f"{source}: {name} is {dtype} of shape {shape}, expected {expected}")
    tensor: NDArray[Any] = file.get_tensor(name)
    return tensor


def check_output(output: Path, n_bytes: int) -> None:
    """Refuse a file that could not be written with so many bytes, before they are computed. Raises OutputUnwritable.

    What takes bytes as they come, a pipe or a device, is not looked into: opening it would be the writing's beginning.
    """
    if is_stream(output):
        if not os.access(output, os.W_OK):
            raise OutputUnwritable(f"--output {output} may not be written into (Permission denied)")
        return
    target = _target(output)
    if not os.path.isdir(target.parent):  # noqa: PTH112 - it never raises
        raise OutputUnwritable(f"--output {output}: there is no folder {target.parent}; make it first")
    fault = fault_of(target)
    if fault not in (None, NOT_THERE):
        raise OutputUnwritable(f"--output {output} {fault}")
    if exists(target) and not os.access(target, os.W_OK):
        raise OutputUnwritable(f"--output {output} may not be overwritten (Permission denied)")
    try:
        with tempfile.NamedTemporaryFile(prefix=TEMP_PREFIX, dir=target.parent) as probe:
            probe.write(bytes(1))
        usage = shutil.disk_usage(target.parent)
    except OSError as error:
        raise OutputUnwritable(f"--output {output} cannot be written ({error.strerror})") from error
    n_needed = n_bytes + _HEADER_BYTES
    if usage.total > 0 and usage.free < n_needed:
        raise OutputUnwritable(
            f"--output {output} takes {n_needed} bytes, and its disk has {usage.free} free; make room or name another"
        )


def write_score(score: Score, output: Path) -> None:
    """Write the results; a file appears whole or not at all. Takes their size once more for a pipe.

    Raises OutputUnwritable.
    """
    tensors = {"logits": score.logits, "k": score.k, "v": score.v, "greedy_ids": score.greedy_ids}
    if score.images is not None:
        tensors |= {
            "image_embeds": score.images.embeds,
            "deepstack": score.images.deepstack,
            "position_ids": score.images.position_ids,
        }
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    try:
        with output_file(output, PRIVATE_MODE) as file:
            if (staged := staged_path(file)) is not None:
                save_file(tensors, staged)
            else:
                file.write(save(tensors))
    except (OSError, SafetensorError) as error:
        raise OutputUnwritable(
            f"--output {output} could not be written: {getattr(error, 'strerror', None) or error}"
        ) from error


def _target(output: Path) -> Path:
    """Where the bytes go when the output is a symbolic link."""
    try:
        return output.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise OutputUnwritable(f"--output {output} cannot be written: {error}") from error
