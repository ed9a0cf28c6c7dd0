"""Makes sure that the model of a drill is there, and compiled kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvferry.drills.errors import ModelUnavailable, ModelUnusable

DEFAULT_MODEL: Final = "smollm2-135m"

LOOK_S: Final = 600.0
"""At model files on a slow share, which are read to their end."""


def get_ready(model: str) -> None:
    """The model, and the kernels: on a machine that never ran a node they are compiled here, with a progress bar; the
    first node would do it unseen. Raises as `ensure_model`."""
    ensure_model(model)
    subprocess.run(
        [sys.executable, "-m", "kvferry.engine.kernels.compile_cache"], stdout=subprocess.DEVNULL, check=False
    )


def ensure_model(model: str) -> None:
    """Fetches a named model that is not in the cache yet; a path is only looked at.

    Raises ModelUnusable in the words (and with the exit code) of `kvferry models inspect` for a path that is no model,
    ModelUnavailable when a name could not be fetched. Through the command line, since drills know
    nothing of the engine.
    """
    listed = _kvferry("models", "list", "--json")
    if listed.returncode == 0 and model in {entry["name"] for entry in json.loads(listed.stdout)}:
        return
    inspected = _kvferry("models", "inspect", "--", model)
    if inspected.returncode == 0:
        return
    if is_path(model):
        said = inspected.stderr.strip().splitlines() or [f"{model} cannot be read as a model"]
        raise ModelUnusable(said[-1].removeprefix("error: ").removeprefix("Error: "), inspected.returncode)
    fetched = subprocess.run(  # however slow the line is: who waits sees how far it is, and may end it
        [sys.executable, "-m", "kvferry.client.cli", "models", "fetch", model],
        stdout=subprocess.DEVNULL,
        stderr=None,  # its progress bar is for the person
        check=False,
    )
    if fetched.returncode != 0:
        raise ModelUnavailable(f"The model {model} could not be fetched; see above.")


def is_path(model: str) -> bool:
    """Whether a person means a file or a folder: it is there, or it is spelt like one. Nothing is fetched for those."""
    spelt_like_one = model.startswith(("/", "./", "../", "~")) or model.endswith((".gguf", "/")) or model in {"", "."}
    return spelt_like_one or os.path.lexists(Path(model))


def _kvferry(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvferry.client.cli", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(
            f"The models could not be looked at within {LOOK_S:.0f} s: does the disk answer that they are on?"
        ) from error
