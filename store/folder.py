"""One model's folder as a person sees it: all files, how segments link, and what is wrong. For the offline commands."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvferry.store import names
from kvferry.store.catalog import known_segment
from kvferry.store.chains import Chains
from kvferry.store.errors import SnapshotGone, SnapshotRejected, StoreUnavailable, os_errors_mapped
from kvferry.store.fs import FileSystem
from kvferry.store.geometry import TokenIds
from kvferry.store.inspection import WHOLE_FILES
from kvferry.store.ownership import only_of
from kvferry.store.payload import Kind
from kvferry.store.reader import open_snapshot
from kvferry.store.segment_file import BlockDamagedError, Terms, open_segment
from kvferry.store.vlkv3 import ContentSpan, prefix_digest

ORPHAN: Final = "orphan_segment"
UNREADABLE: Final = "unreadable"
"""A problem that begins so is the disk's, not the file's."""


@dataclass(frozen=True, slots=True)
class FileView:
    """One file: positions start..end-1; token_ids are its own, None when it is refused or unreadable."""

    path: Path
    n_bytes: int
    mtime_s: float
    version: int = 0
    kind: Kind = Kind.F32
    start: int = 0
    token_ids: TokenIds | None = None
    problem: str = ""  # a refusal's reason, or a sentence

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + (0 if self.token_ids is None else len(self.token_ids))


@dataclass(slots=True)
class Folder:
    """What lay in one folder when it was looked at. ``prints``: of its segments, as "", once one is known."""

    path: Path
    files: dict[str, FileView]
    chains: Chains
    refusals: dict[str, SnapshotRejected] = field(default_factory=dict)
    prints: dict[str, str] = field(default_factory=dict)

    def forget(self, name: str) -> None:
        """It is gone."""
        self.chains.remove(name)
        self.files.pop(name, None)

    def unreadable(self) -> tuple[str, ...]:
        """Files that the disk did not give: nobody knows what they continue."""
        return tuple(name for name, view in self.files.items() if view.problem.startswith(UNREADABLE))

    def tokens(self, name: str) -> TokenIds | None:
        """All tokens from position 0 on, None for what cannot be used."""
        view = self.files[name]
        if view.token_ids is None or not names.is_segment(name):
            return view.token_ids
        return self.chains.token_ids(name) if self.chains.is_linked(name) else None

    def only_of(self, token_ids: TokenIds, spans: Sequence[ContentSpan] = (), n_shared: int = 0) -> tuple[str, ...]:
        """What goes when the conversation of these tokens goes: see ownership.only_of."""
        whole = {
            name: view.token_ids
            for name, view in self.files.items()
            if view.token_ids is not None and not names.is_segment(name)
        }
        return only_of(self.chains, whole, token_ids, spans, n_shared)

    def up_to(self, name: str) -> tuple[str, ...]:
        """The file, and those before it that nothing else hangs on."""
        going = [name]
        at = self.chains.parent(name)
        while at is not None and self.chains.children(at) <= set(going):
            going.append(at)
            at = self.chains.parent(at)
        return tuple(going)


def model_folders(fs: FileSystem, directory: Path) -> Iterator[Path]:
    """The directory itself when a store's files lie in it, and its folders in which some do.

    Other folders are nobody's to look into. Raises StoreUnavailable.
    """
    with os_errors_mapped("list", directory):
        try:
            found = fs.names(str(directory))
        except FileNotFoundError:
            raise StoreUnavailable(
                f"there is no directory {directory}", op="list", path=directory, recovery="page_operator"
            ) from None
    if any(_is_ours(name) for name in found):
        yield directory
    for name in sorted(name for name in found if names.is_fingerprint(name) and not _is_ours(name)):
        if _is_model_folder(fs, directory / name):
            yield directory / name


def _is_ours(name: str) -> bool:
    """Whether a store makes entries of this name in a model's folder."""
    return names.is_snapshot(name) or names.parse_temp(name) is not None or name in {names.TRASH, names.QUARANTINE}


def _is_model_folder(fs: FileSystem, path: Path) -> bool:
    """One that cannot be listed counts: whoever looks into it will say so."""
    try:
        return stat.S_ISDIR(fs.lstat(str(path)).st_mode) and any(_is_ours(name) for name in fs.names(str(path)))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def look(fs: FileSystem, folder: Path, terms: Terms, on_files: Callable[[int], None] = lambda _: None) -> Folder:
    """Opens every snapshot in a folder; ``on_files(1)`` after each. Raises StoreUnavailable when it cannot be
    listed."""
    prints: dict[str, str] = {}
    chains = Chains(lambda ids, spans: prefix_digest(terms.seal, prints.get("", ""), ids, spans))
    out = Folder(folder, {}, chains, prints=prints)
    look_again(fs, out, terms, on_files)
    return out


def look_again(
    fs: FileSystem,
    folder: Folder,
    terms: Terms,
    on_files: Callable[[int], None] = lambda _: None,
    taken: frozenset[str] = frozenset(),
) -> None:
    """Lists the names, opens what is new and forgets what is gone, but for what we have ``taken`` ourselves.

    Otherwise as ``look``.
    """
    with os_errors_mapped("list", folder.path):
        found = {name for name in fs.names(str(folder.path)) if names.is_snapshot(name)}
    for name in folder.files.keys() - found - taken:
        folder.forget(name)
    for name in sorted(found - folder.files.keys()):
        view = _view(fs, folder.path / name, terms, folder)
        if view is not None:
            folder.files[name] = view
        on_files(1)
    waiting = set(folder.chains.orphans())
    for name, view in folder.files.items():
        if name in waiting or view.problem == ORPHAN:
            folder.files[name] = replace(view, problem=ORPHAN if name in waiting else "")


def _view(fs: FileSystem, path: Path, terms: Terms, out: Folder) -> FileView | None:
    try:
        status = fs.lstat(str(path))
    except FileNotFoundError:
        return None
    view = FileView(path, status.st_size, status.st_mtime, 3 if names.is_segment(path.name) else 1)
    try:
        return _segment(fs, view, terms, out) if view.version == 3 else _whole(fs, view, terms)
    except SnapshotRejected as error:
        out.refusals[path.name] = error
        return replace(view, problem=error.reason)
    except SnapshotGone:
        return None
    except StoreUnavailable as error:
        return replace(view, problem=f"{UNREADABLE}: {error}")


def _segment(fs: FileSystem, view: FileView, terms: Terms, out: Folder) -> FileView:
    with open_segment(fs, view.path, terms) as file:
        if file.extent.fingerprint != out.prints.setdefault("", file.extent.fingerprint):
            raise SnapshotRejected("fingerprint_mismatch", "its neighbours are another model's", path=view.path)
        segment, kind = known_segment(file), file.extent.kind
    for name, error in out.chains.add(segment)[1]:
        out.refusals[name] = error.at(out.path / name)
        if name == view.path.name:
            raise error.at(view.path)
        out.files[name] = replace(out.files[name], problem=error.reason, token_ids=None)
    return replace(view, kind=kind, start=segment.start, token_ids=np.array(segment.token_ids))


def _whole(fs: FileSystem, view: FileView, terms: Terms) -> FileView:
    with open_snapshot(fs, view.path, terms.geometry, versions=WHOLE_FILES) as snapshot:
        snapshot.check_quickly(terms.vocab_size, view.path.name)
        version = snapshot.header.version
        ids = np.array(snapshot.token_ids())
        return replace(view, version=version, kind=Kind.Q8 if version == 2 else Kind.F32, token_ids=ids)


def read_rows_of(
    fs: FileSystem, view: FileView, terms: Terms, on_read: Callable[[int], None]
) -> list[BlockDamagedError]:
    """Reads a file's rows to the end; a segment's damaged blocks. Whole files have no digests to hold them against, but
    the disk may refuse them, and scales may be none. ``on_read(n_bytes)`` after each piece.

    Raises SnapshotRejected, SnapshotGone, StoreUnavailable.
    """
    if view.version != 3:
        with open_snapshot(fs, view.path, terms.geometry, versions=WHOLE_FILES) as snapshot:
            snapshot.restore(snapshot.n_tokens, _Counted(on_read))
        return []
    with open_segment(fs, view.path, terms) as file:
        return file.damaged_blocks(on_read)


class _Counted:
    """A sink that only says how much came."""

    def __init__(self, on_read: Callable[[int], None]) -> None:
        self._on_read = on_read

    def write_rows(self, layer: int, start: int, k: Any, v: Any) -> None:  # noqa: ARG002 -- the sink's contract
        self._on_read(k.nbytes + v.nbytes)

    def write_q8(self, layer: int, start: int, *columns: Any) -> None:  # noqa: ARG002 -- the sink's contract
        self._on_read(sum(column.nbytes for column in columns))
