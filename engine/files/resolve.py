"""From what a person types to the file or folder that holds the model."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.engine.errors import ModelInvalid, ModelNotFound
from kvferry.engine.files.catalogue import KNOWN_MODELS, find_record
from kvferry.engine.files.gguf_model import MMPROJ_PATTERN
from kvferry.engine.files.regular import exists, fault_of


def resolve_model(name_or_path: str) -> Path:
    """The GGUF file, or the checkpoint folder, behind a fetched name ("smollm2-135m", "ORG/NAME") or a path.

    A fetched name wins over a path of the same spelling; write ``./NAME`` for the path. A folder with one GGUF file
    (and perhaps its mmproj file) and no safetensors files means that GGUF file.

    Raises ModelNotFound when neither a fetched model nor a path is there, ModelInvalid for a folder without
    one and for what is neither a folder nor a file that can be read.
    """
    record = find_record(name_or_path)
    if record is not None:
        if not exists(record.path):
            raise ModelNotFound(
                f"model {name_or_path!r} was fetched, but {record.path} is gone; "
                f"fetch it again: kvferry models fetch {name_or_path}"
            )
        return _model_in(record.path)
    if name_or_path in KNOWN_MODELS:
        raise ModelNotFound(f"model {name_or_path!r} is not fetched yet; run: kvferry models fetch {name_or_path}")
    path = Path(os.path.expanduser(name_or_path))  # noqa: PTH111 - Path's own raises for ~nobody
    if name_or_path and exists(path):
        return _model_in(path)
    raise ModelNotFound(
        f"there is no model {name_or_path!r}: neither a fetched name (see `kvferry models list`), "
        "nor a GGUF file, nor a model folder"
    )


def _model_in(path: Path) -> Path:
    if not path.is_dir():
        fault = fault_of(path)
        if fault is not None:
            raise ModelInvalid(f"{path} {fault}")
        return path
    if not os.access(path, os.R_OK | os.X_OK):
        raise ModelInvalid(f"{path} is a folder that cannot be read (Permission denied)")
    if any(path.glob("*.safetensors")):
        return path
    found = sorted(set(path.glob("*.gguf")) - set(path.glob(MMPROJ_PATTERN)))
    if len(found) == 1:
        return found[0]
    if (path / "config.json").is_file() and not found:
        return path
    if found:
        names = ", ".join(entry.name for entry in found)
        raise ModelInvalid(f"{path} holds several GGUF files ({names}); name one of them")
    raise ModelInvalid(f"{path} is a folder without a config.json and without a GGUF file, so it is not a model")
