"""Promise 29: whatever happens to the cache of compiled kernels, a node gets ready, computes the same, and says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .running_node import KVFERRY, running_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SOMEBODY = 12345
# Root may do everything, so nothing is read-only for it: the node is started without that.
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", *KVFERRY)

Damage = Callable[[Path], object]


def flipped(data: bytes) -> bytes:
    """With one bit changed."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


OF_FILES: dict[str, Damage] = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "another user's": lambda path: os.chown(path, SOMEBODY, -1),
    "unreadable": lambda path: path.chmod(0),
}
OF_FOLDERS: dict[str, Damage] = {
    "read-only": lambda path: path.chmod(0o500),
    "another user's": lambda path: os.chown(path, SOMEBODY, -1),
}


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


def damages(kernels: Kernels) -> Iterator[tuple[str, Callable[[], object]]]:
    """Thirty, each of what is there when its turn comes."""
    targets: dict[str, Callable[[], Path]] = {
        "manifest": lambda: kernels.manifest,
        "index": lambda: kernels.file("nbi", largest=True),
        "small code": lambda: kernels.file("nbc", largest=False),
        "large code": lambda: kernels.file("nbc", largest=True),
    }
    for target, find in targets.items():
        for name, damage in OF_FILES.items():
            yield f"{target} {name}", lambda damage=damage, find=find: damage(find())
    for name, damage in OF_FOLDERS.items():
        yield f"modules {name}", lambda damage=damage: damage(kernels.modules)
    yield "folder read-only", lambda: kernels.folder.chmod(0o500)
    yield "folder gone", lambda: shutil.rmtree(kernels.folder)
    yield "root for all to write", lambda: kernels.root.chmod(0o777)
    yield "root another user's", partial(os.chown, kernels.root, SOMEBODY, -1)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root may give files away")
def test_29_thirty_damages_heal(tmp_path: Path, smollm2_path: Path, prompts: dict[str, list[int]]) -> None:
    cache = tmp_path / "cache"
    node = partial(
        running_node, tmp_path / "n", smollm2_path, "--threads", "1", "--metrics", "127.0.0.1:0",
        program=WITHOUT_PRIVILEGES, environment={"KVFERRY_CACHE": str(cache)}, start_seconds=600,
    )  # fmt: skip
    compile_all = "from kvferry.engine.kernels.compile_cache import compile_cache; compile_cache()"
    subprocess.run([sys.executable, "-c", compile_all], env=os.environ | {"KVFERRY_CACHE": str(cache)}, check=True)

    def start() -> tuple[list[int], float, str]:
        """What a node computes, how often it healed its cache, and its log."""
        with node() as running:
            tokens = running.run_turn(prompts["chat_en"], max_tokens=8).tokens
            address = json.loads((tmp_path / "n/ready.json").read_text())["metrics"]
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
                families = {f.name: f.samples for f in text_string_to_metric_families(response.read().decode())}
            assert running.stop() == 0
            (healed,) = (s.value for s in families["kvferry_events"] if s.labels["event"] == "compile_cache_healed")
            return tokens, healed, running.log

    undamaged, n_healed, _ = start()
    assert n_healed == 0
    cases = list(damages(Kernels(cache)))
    assert len(cases) == 30
    for name, damage in cases:
        damage()
        tokens, n_healed, log = start()
        assert (name, tokens, n_healed) == (name, undamaged, 1.0)
        assert "were damaged and are made anew" in log
    os.chown(cache / "kernels", 0, -1)
    assert start()[:2] == (undamaged, 0.0)
