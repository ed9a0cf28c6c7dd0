"""Where segments stand in their chains, by their heads alone: for those of other folders, and those that another node
saved and nobody told of. No key is needed, and of a file only its first 320 bytes are read, once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from kvferry.store import names
from kvferry.store.errors import SnapshotRejected
from kvferry.store.fs import FileSystem
from kvferry.store.space import Standing
from kvferry.store.vlkv3 import FIXED_BYTES, Extent, name_of_hint, parse_extent


class Heads:
    """Remembers what it read: a file never changes. One thread at a time; reading is I/O."""

    def __init__(self, fs: FileSystem, folder: Path) -> None:
        """``folder``: what NAME lies in; FOLDER/NAME lies beside it."""
        self._fs = fs
        self._folder = folder
        self._extents: dict[str, Extent | None] = {}  # None: its head is not one of a segment

    def standing(self, known: Mapping[str, Standing], listed: Iterable[str]) -> Mapping[str, Standing]:
        """``known``, and what the heads of the other listed segments say. A head that cannot be read has no say: its
        file is judged as one that stands alone."""
        unknown = [name for name in listed if name not in known and names.is_segment(PurePosixPath(name).name)]
        for name in unknown:
            if name not in self._extents:
                with suppress(OSError):
                    self._extents[name] = self._read(name)
        self._extents = {name: self._extents[name] for name in unknown if name in self._extents}
        extents = {name: extent for name, extent in self._extents.items() if extent is not None}
        ends = {(_folder_of(name), extent.prefix): name for name, extent in extents.items()}
        found = dict(known)
        for name, extent in extents.items():
            hinted = f"{_folder_of(name)}{name_of_hint(extent.parent_hint)}"
            is_there = hinted in extents or hinted in known
            parent = hinted if is_there else ends.get((_folder_of(name), extent.parent))
            found[name] = Standing(extent.start, extent.end, parent if extent.start else None)
        return found

    def _read(self, name: str) -> Extent | None:
        path = self._folder.parent / name if "/" in name else self._folder / name
        head = bytearray(FIXED_BYTES)
        fd = self._fs.open_read(str(path))
        try:
            n_read = self._fs.preadv(fd, [memoryview(head)], 0)
        finally:
            with suppress(OSError):
                self._fs.close(fd)
        with suppress(SnapshotRejected):
            return parse_extent(bytes(head[:n_read]), None)
        return None


def _folder_of(name: str) -> str:
    """``FOLDER/`` of such a name; nothing for one without."""
    folder, mark, _ = name.rpartition("/")
    return folder + mark
