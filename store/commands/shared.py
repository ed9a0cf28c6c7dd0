"""What the commands have in common: options, JSON, and the words of a verdict."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

import click

from kvferry.store.errors import SnapshotRejected, StoreUnavailable
from kvferry.store.folder import Folder, look, look_again, model_folders
from kvferry.store.fs import FileSystem
from kvferry.store.geometry import KvGeometry
from kvferry.store.model_shape import ModelShape, parse_shape, read_shape
from kvferry.store.names import digest_in_folder
from kvferry.store.place import StorePlace
from kvferry.store.seals import Seal
from kvferry.store.segment_file import Terms
from kvferry.terminal.completing import completes
from kvferry.terminal.progress import gauge
from kvferry.terminal.words import say

Command = TypeVar("Command", bound=Callable[..., Any])

EXIT_INTERRUPTED = 130  # as a shell has it for Ctrl-C, and client/cli.py

_OPERATOR = f"operator-{uuid4().hex[:12]}"  # in the names of temporary files: other commands leave them alone


def model_options(command: Command) -> Command:
    """--model, --geometry and --vocab: what a file is held against."""
    for option in (
        click.option("--vocab", "vocab_size", type=click.IntRange(min=1), help="Vocabulary size, with --geometry."),
        click.option(
            "--geometry",
            metavar="L,NKV,HD[,BS]",
            help="Layers, KV heads, head dimension, block size (32) to compare with.",
        ),
        click.option(
            "--model",
            shell_complete=completes("models"),
            help="Model folder, GGUF file or fetched name to compare with.",
        ),
    ):
        command = option(command)
    return command


def chosen_shape(model: str | None, geometry: str | None, vocab_size: int | None) -> ModelShape | None:
    """The shape that the options name; None when they name none. Raises StoreMisuse, click.UsageError."""
    if model is not None and geometry is not None:
        raise click.UsageError("give --model or --geometry, not both")
    if geometry is not None:
        return parse_shape(geometry, vocab_size)
    if vocab_size is not None and model is None:
        raise click.UsageError("--vocab goes with --geometry")
    return None if model is None else read_shape(model)


class _File(click.Path):
    """A file of this machine. Whether it can be read is told when it is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuses addresses, which would pass for paths."""
        if "://" in str(value):
            self.fail(
                f"{value} is no file of this machine; ls, lcp, fsck, scrub, gc, du and rm take s3:// stores", param, ctx
            )
        return super().convert(value, param, ctx)


FILE = _File(path_type=Path, readable=False)


@dataclass(frozen=True, slots=True)
class OpenStore:
    """What a command works on: where, and on which terms its files are read."""

    fs: FileSystem
    root: Path
    seal: Seal
    said: str  # the place, as it was given
    troubles: list[str] = field(default_factory=list)  # folders that could not be read

    def terms(self, shape: ModelShape | None = None, folder: Path | None = None) -> Terms:
        """What a folder's files are held against; a shape's None leaves a field to the file.

        Without a folder the root is one. A tenant's folder says whose key its files are sealed with.
        """
        geometry, vocab_size = parts(shape)
        seal = self.seal.for_tenant(digest_in_folder((folder or self.root).absolute().name))
        return Terms(geometry=geometry, vocab_size=vocab_size, seal=seal)

    def folders(self, shape: ModelShape | None = None, *, quiet: bool) -> Iterator[Folder]:
        """All models' folders, looked at under a bar. One that cannot be read is a trouble; the others go on.

        Raises StoreUnavailable when not even the store can be listed.
        """
        for path in model_folders(self.fs, self.root):
            try:
                with progress(f"{path.name[:16]} heads", None, quiet=quiet, in_bytes=False) as advance:
                    found = look(self.fs, path, self.terms(shape, path), advance)
            except StoreUnavailable as error:
                self.troubles.append(str(error))
            else:
                yield found

    def is_still_whole(self, folder: Folder, *taken: str) -> bool:
        """Looks again, right before something in the folder is removed, and when it was ``taken`` away: others save
        meanwhile.

        False, and a trouble, when a file in it cannot be read: nobody knows what that one continues. Raises
        StoreUnavailable.
        """
        look_again(self.fs, folder, self.terms(None, folder.path), taken=frozenset(taken))
        if unreadable := folder.unreadable():
            trouble = f"no segment is removed while {folder.path / unreadable[0]} cannot be read"
            if trouble not in self.troubles:
                self.troubles.append(trouble)
        return not unreadable

    def finish(self, exit_code: int = 0) -> NoReturn:
        """Ends the command: with this code, or with that of the troubles, which are told."""
        for trouble in self.troubles:
            say(f"error: {trouble}", err=True)
        ends_with = StoreUnavailable.default_exit_code if self.troubles else 0
        click.get_current_context().exit(exit_code or ends_with)


def operator_id() -> str:
    """The node id under which this process writes."""
    return _OPERATOR


@contextmanager
def progress(what: str, total: int | None, *, quiet: bool, in_bytes: bool = True) -> Iterator[Callable[[int], None]]:
    """How far it is, by what more is done; nothing where JSON is asked for."""
    with gauge(what, total, quiet=quiet, in_bytes=in_bytes) as told:
        yield told.advance


def key_options(command: Command) -> Command:
    """--store-key-file and --store-encrypted, as node and coordinator have them."""
    for option in (
        click.option("--store-encrypted", "encrypted", is_flag=True, help="The files are encrypted with that key."),
        click.option(
            "--store-key-file",
            "key_file",
            type=click.Path(path_type=Path),
            envvar="KVFERRY_STORE_KEY_FILE",
            show_envvar=True,
            help="The fleet's key, where the nodes have one.",
        ),
    ):
        command = option(command)
    return command


def open_place(where: str, key_file: Path | None, encrypted: bool) -> OpenStore:
    """Raises StoreMisuse for a place or a key that cannot be."""
    fs, root, seal = StorePlace(where, key_file, encrypted).open()
    return OpenStore(fs, root, seal, where)


def store_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """STORE and the key options; the command gets them as one OpenStore, ``store``."""

    @functools.wraps(command)
    def with_store(*args: Any, where: str, key_file: Path | None, encrypted: bool, **kwargs: Any) -> Any:
        return command(*args, store=open_place(where, key_file, encrypted), **kwargs)

    return click.argument("where", metavar="STORE")(key_options(with_store))


def parts(shape: ModelShape | None) -> tuple[KvGeometry | None, int | None]:
    """Geometry and vocabulary, or nothing of either."""
    return (None, None) if shape is None else (shape.geometry, shape.vocab_size)


def verdict(refusal: SnapshotRejected | None) -> dict[str, object]:
    """The verdict for a program."""
    if refusal is None:
        return {"verdict": "ok", "reason": None, "detail": None, "exit_code": 0}
    return {"verdict": "refused", "reason": refusal.reason, "detail": refusal.detail, "exit_code": refusal.exit_code}


def finish(refusal: SnapshotRejected | None) -> None:
    """Ends the command with the refusal's exit code."""
    if refusal is not None:
        click.get_current_context().exit(refusal.exit_code)
