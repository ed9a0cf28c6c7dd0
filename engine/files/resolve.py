"""From what a person types to the file or folder that holds the model."""

from __future__ import annotations

from pathlib import Path

from kvferry.engine.errors import ModelInvalid, ModelNotFound
from kvferry.engine.files.catalogue import KNOWN_MODELS, find_record
from kvferry.engine.files.gguf_model import MMPROJ_PATTERN


def resolve_model(name_or_path: str) -> Path:
    """The GGUF file, or the checkpoint folder, behind a fetched name ("smollm2-135m", "ORG/NAME") or a path.

    A fetched name wins over a path of the same spelling; write ``./NAME`` for the path. A folder with one GGUF file
    (and perhaps its mmproj file) and no safetensors files means that GGUF file.

    Raises ModelNotFound when neither a fetched model nor a path is there, ModelInvalid for a folder without one.
    """
    record = find_record(name_or_path)
    if record is not None:
        if not record.path.exists():
            raise ModelNotFound(
                f"model {name_or_path!r} was fetched, but {record.path} is gone; "
                f"fetch it again: kvferry models fetch {name_or_path}"
            )
        return _model_in(record.path)
    if name_or_path in KNOWN_MODELS:
        raise ModelNotFound(f"model {name_or_path!r} is not fetched yet; run: kvferry models fetch {name_or_path}")
    path = Path(name_or_path).expanduser()
    if name_or_path and path.exists():
        return _model_in(path)
    raise ModelNotFound(
        f"there is no model {name_or_path!r}: neither a fetched name (see `kvferry models list`), "
        "nor a GGUF file, nor a model folder"
    )


def _model_in(path: Path) -> Path:
    if not path.is_dir() or any(path.glob("*.safetensors")):
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
