"""Opening a model, whatever it is on disk."""

from __future__ import annotations

from pathlib import Path

from kvferry.engine.files.checkpoint import open_checkpoint
from kvferry.engine.files.gguf_model import open_gguf_model
from kvferry.engine.files.model_file import ModelFile


def open_model(path: Path, *, vision_path: Path | None = None) -> ModelFile:
    """Open a checkpoint folder or a GGUF file and check that it holds the whole model and nothing else.

    ``vision_path``: the mmproj file of a GGUF model with images; by default the one beside it, if there is just one.

    Raises ModelNotFound, ModelInvalid for what is damaged, incomplete or contradictory, UnsupportedArchitecture.
    """
    path = Path(path)
    if path.is_dir():
        return open_checkpoint(path)
    return open_gguf_model(path, vision_path)
