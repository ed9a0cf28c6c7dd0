"""Promise 29: whatever happens to the cache of compiled kernels, a node gets ready, computes the same, and says so."""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.engine.kernels.compile_cache import cached_kernels, compile_cache

from .running_node import KVFERRY, running_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SOMEBODY = 12345
# Root may do everything, so nothing is read-only for it: the node is started without that.
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", *KVFERRY)


def flipped(data: bytes) -> bytes:
    """With one bit changed."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


@dataclass(frozen=True)
class Started:
    """What a node computes, how often it healed its cache, and whether its log says so."""

    tokens: list[int]
    n_healed: float
    told: bool


class Kernels:
    """A node's cache of compiled kernels, as it is published now."""

    def __init__(self, cache: Path) -> None:
        self.root = cache / "kernels"

    @property
    def manifest(self) -> Path:
        (found,) = (path for path in self.root.glob("*.json") if "more" not in path.name)
        return found

    @property
    def folder(self) -> Path:
        return self.root / str(json.loads(self.manifest.read_text())["folder"])

    @property
    def modules(self) -> Path:
        (found,) = (path for path in self.folder.iterdir() if path.is_dir())
        return found

    def file(self, suffix: str, *, largest: bool) -> Path:
        return sorted(self.modules.glob(f"*.{suffix}"), key=lambda path: path.stat().st_size)[-1 if largest else 0]

    def start(self, folder: Path, model: Path, prompt: list[int]) -> Started:
        """Start a node with it, hold a turn, and stop it."""
        flags = ("--threads", "1", "--metrics", "127.0.0.1:0")
        environment = {"KVFERRY_CACHE": str(self.root.parent)}
        with running_node(
            folder, model, *flags, program=WITHOUT_PRIVILEGES, environment=environment, start_seconds=600
        ) as node:
            tokens = node.run_turn(prompt, max_tokens=8).tokens
            address = json.loads((folder / "ready.json").read_text())["metrics"]
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
                families = {f.name: f.samples for f in text_string_to_metric_families(response.read().decode())}
            assert node.stop() == 0
            (healed,) = (s.value for s in families["kvferry_events"] if s.labels["event"] == "compile_cache_healed")
            return Started(tokens, healed, "were damaged and are made anew" in node.log)


# What is damaged, and how: thirty in all.
FILES: Final[dict[str, Callable[[Kernels], Path]]] = {
    "manifest": lambda kernels: kernels.manifest,
    "index": lambda kernels: kernels.file("nbi", largest=True),
    "small code": lambda kernels: kernels.file("nbc", largest=False),
    "large code": lambda kernels: kernels.file("nbc", largest=True),
}
OF_FILES: Final[dict[str, Callable[[Path], object]]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "another user's": lambda path: os.chown(path, SOMEBODY, -1),
    "unreadable": lambda path: path.chmod(0),
}
OF_FOLDERS: Final[dict[str, Callable[[Kernels], object]]] = {
    "modules read-only": lambda kernels: kernels.modules.chmod(0o500),
    "modules another user's": lambda kernels: os.chown(kernels.modules, SOMEBODY, -1),
    "folder read-only": lambda kernels: kernels.folder.chmod(0o500),
    "folder gone": lambda kernels: shutil.rmtree(kernels.folder),
    "root for all to write": lambda kernels: kernels.root.chmod(0o777),
    "root another user's": lambda kernels: os.chown(kernels.root, SOMEBODY, -1),
}


@pytest.fixture
def kernels(tmp_path: Path) -> Kernels:
    """A copy of this machine's own, as they are published: a cache that was filled long ago."""
    compile_cache()
    published = cached_kernels()
    assert published is not None
    root = tmp_path / "cache/kernels"
    shutil.copytree(published, root / published.name)
    manifest = f"{published.name.rpartition('-')[0]}.json"
    shutil.copyfile(published.parent / manifest, root / manifest)
    root.chmod(0o700)
    return Kernels(root.parent)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root may give files away")
@pytest.mark.parametrize("target", [*FILES, "folders"])
def test_29_damages_heal(
    target: str, kernels: Kernels, tmp_path: Path, smollm2_path: Path, prompts: dict[str, list[int]]
) -> None:
    start = partial(kernels.start, tmp_path / "n", smollm2_path, prompts["chat_en"])
    undamaged = start()
    assert not undamaged.n_healed
    find = FILES.get(target)
    damages = (
        OF_FOLDERS
        if find is None
        else {name: lambda kernels, damage=damage: damage(find(kernels)) for name, damage in OF_FILES.items()}
    )
    assert len(damages) == 6
    for name, damage in damages.items():
        damage(kernels)
        assert (name, start()) == (name, Started(undamaged.tokens, 1.0, told=True))
    os.chown(kernels.root, 0, -1)
    assert start() == undamaged
