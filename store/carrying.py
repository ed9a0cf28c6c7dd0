"""A conversation's snapshots on their way from one store to another: which files they are, and how they are taken in.

The files travel as they are, sealed ones too. What comes in is under its final name only when it is whole; nodes check
every row of it before they use one, as of any other file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from uuid import uuid4

from kvferry.store import names
from kvferry.store.errors import StoreMisuse, os_errors_mapped
from kvferry.store.folder import look, model_folders
from kvferry.store.geometry import TokenIds
from kvferry.store.place import StorePlace
from kvferry.store.segment_file import Terms
from kvferry.store.vlkv3 import ContentSpan

NODE_ID = "import"


def rows_of(place: StorePlace, token_ids: TokenIds, spans: Sequence[ContentSpan] = ()) -> list[Path]:
    """The segments, of every model, that hold rows of a prefix of these tokens, int32 [n]; parents come first.

    Raises StoreMisuse, StoreUnavailable.
    """
    local_folder(place)
    fs, root, seal = place.open()
    found = []
    for path in model_folders(fs, root):
        chains = look(fs, path, Terms(geometry=None, vocab_size=None, seal=seal)).chains
        found += [path / s.name for s in sorted(chains.along(token_ids, spans), key=lambda s: (s.start, s.name))]
    return found


def adopt(
    place: StorePlace, folder: str, name: str, n_bytes: int, chunks: Iterable[bytes],
    unique: Callable[[], str] = lambda: uuid4().hex,
) -> bool:  # fmt: skip
    """Writes a file of another store into the model's folder of this one; False when it is there already.

    Raises StoreMisuse for names that no store gives, StoreUnavailable.
    """
    names.check_snapshot(name)
    if not names.is_fingerprint(folder):
        raise StoreMisuse(f"{folder[:80]!r} is no model's folder", op="import", path=name)
    directory = local_folder(place) / folder
    target = directory / name
    temporary = directory / names.temp_name(name, NODE_ID, unique(), n_bytes)
    with os_errors_mapped("import", target):
        if target.exists():
            return False
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)
    return True


def local_folder(place: StorePlace) -> Path:
    """Raises StoreMisuse for a store that is no folder here."""
    if place.folder is None:
        raise StoreMisuse("rows are carried to and from a store in a folder only", op="import", path=Path(place.where))
    return place.folder
