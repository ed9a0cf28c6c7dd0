"""Makes sure that the model of a drill is there."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

from kvferry.drills.errors import ModelUnavailable

DEFAULT_MODEL: Final = "smollm2-135m"

FETCH_S: Final = 600.0
"""98 MB over a slow line."""


def ensure_model(model: str) -> None:
    """Fetches a named model that is not in the cache yet; a path is left alone. Raises ModelUnavailable.

    Through the command line, since drills know nothing of the engine.
    """
    listed = _kvferry("models", "list", "--json")
    if listed.returncode == 0 and model in {entry["name"] for entry in json.loads(listed.stdout)}:
        return
    if _kvferry("models", "inspect", model).returncode == 0:
        return
    fetched = subprocess.run(
        [sys.executable, "-m", "kvferry.client.cli", "models", "fetch", model],
        stdout=subprocess.DEVNULL,
        stderr=None,  # its progress bar is for the person
        timeout=FETCH_S,
        check=False,
    )
    if fetched.returncode != 0:
        raise ModelUnavailable(f"The model {model} could not be fetched; see above.")


def _kvferry(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvferry.client.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
