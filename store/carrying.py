"""A conversation's snapshots on their way from one store to another: which files they are, and how they are taken in.

The files travel as they are, sealed ones too. What comes in is under its final name only when it is whole; nodes check
every row of it before they use one, as of any other file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from uuid import uuid4

from kvferry.store import names
from kvferry.store.directory import StoreDirectory
from kvferry.store.errors import StoreMisuse
from kvferry.store.folder import look, model_folders
from kvferry.store.fs import PosixFileSystem
from kvferry.store.geometry import TokenIds
from kvferry.store.place import StorePlace
from kvferry.store.publish import create_temp, publish
from kvferry.store.segment_file import Terms
from kvferry.store.vlkv3 import ContentSpan

NODE_ID = "import"


def rows_of(place: StorePlace, token_ids: TokenIds, spans: Sequence[ContentSpan] = ()) -> list[Path]:
    """The segments, of every model, that hold rows of a prefix of these tokens, int32 [n]; parents come first.

    Raises StoreMisuse, StoreUnavailable.
    """
    existing_folder(place)
    fs, root, seal = place.open()
    found = []
    for path in model_folders(fs, root):
        own_seal = seal.for_tenant(names.digest_in_folder(path.absolute().name))
        chains = look(fs, path, Terms(geometry=None, vocab_size=None, seal=own_seal)).chains
        found += [path / s.name for s in sorted(chains.along(token_ids, spans), key=lambda s: (s.start, s.name))]
    return found


def adopt(
    place: StorePlace, folder: str, name: str, n_bytes: int, chunks: Iterable[bytes],
    unique: Callable[[], str] = lambda: uuid4().hex,
) -> bool:  # fmt: skip
    """Writes a file of another store into the model's folder of this one; False when it is there already.

    Raises StoreMisuse for names that no store gives, StoreFull, StoreUnavailable, also when more or fewer bytes came.
    """
    check_adoptable(folder, name)
    directory = local_folder(place) / folder
    target = directory / name
    if target.exists():
        return False
    fs = PosixFileSystem()
    StoreDirectory(fs, directory.parent, folder, NODE_ID, unique).make()
    with create_temp(fs, directory / names.temp_name(name, NODE_ID, unique(), n_bytes)) as temp:
        for chunk in chunks:
            temp.write([memoryview(chunk)])
        return publish(fs, temp.path, target, temp.finish(n_bytes), confirm=lambda: None) == "published"


def check_adoptable(folder: str, name: str) -> None:
    """Raises SnapshotRejected or StoreMisuse for names that no store gives."""
    names.check_snapshot(name)
    if not names.is_fingerprint(folder):
        raise StoreMisuse(f"{folder[:80]!r} is no model's folder", op="import", path=name)


def existing_folder(place: StorePlace) -> Path:
    """The store, which is there: what is put into one that is only made for it is never read. Raises StoreMisuse."""
    folder = local_folder(place)
    if not folder.is_dir():
        raise StoreMisuse(
            f"there is no folder {folder}: name the snapshot folder that the nodes share, or make it",
            op="import",
            path=folder,
        )
    return folder


def local_folder(place: StorePlace) -> Path:
    """Raises StoreMisuse for a store that is no folder here."""
    if place.folder is None:
        raise StoreMisuse("rows are carried to and from a store in a folder only", op="import", path=Path(place.where))
    return place.folder
