"""Compiled kernels are used whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.engine.kernels import compile_cache
from kvferry.engine.kernels.compile_cache import CompileCache
from kvferry.engine.kernels.instruction_sets import choose_instruction_set

FILES = {"module/f.nbi": b"index", "module/f.1.nbc": b"machine code", "module/f.2.nbc": b"more machine code"}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "another user's": lambda path: os.chown(path, 12345, -1) if os.geteuid() == 0 else pytest.skip("only root may"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_COMPILING_CHILD", "1")  # this process plays the child: it starts none
    return tmp_path / "kernels"


def published(root: Path) -> CompileCache:
    cache = CompileCache(root, "key")
    assert not cache.is_warm
    (cache.folder / "module").mkdir()
    (cache.folder / "module" / "f.nbi").write_bytes(b"index")
    (cache.folder / "module" / "f.1.nbc").write_bytes(b"machine code")
    cache.publish()
    return cache


def test_a_published_folder_is_used_by_the_next_process(root):
    first = published(root)
    second = CompileCache(root, "key")
    assert second.is_warm
    assert second.folder == first.folder


@pytest.fixture
def child(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """This process plays the parent as well: its child compiles what is missing. How many files each one compiled."""
    n_compiled: list[int] = []

    def run(*_: object, **__: object) -> None:
        monkeypatch.setenv("KVFERRY_COMPILING_CHILD", "1")
        cache = CompileCache(root, "key")
        missing = [name for name in FILES if not (cache.folder / name).exists()]
        for name in missing:
            (cache.folder / name).parent.mkdir(exist_ok=True)
            (cache.folder / name).write_bytes(FILES[name])
        n_compiled.append(len(missing))
        cache.publish()
        monkeypatch.delenv("KVFERRY_COMPILING_CHILD")

    monkeypatch.delenv("KVFERRY_COMPILING_CHILD")
    monkeypatch.setattr(compile_cache.subprocess, "run", run)
    return n_compiled


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("target", ["index", "code", "manifest"])
def test_what_is_damaged_is_made_anew_and_nothing_else(root, child, target, damage, caplog):
    first = CompileCache(root, "key")
    path = {
        "index": first.folder / "module/f.nbi",
        "code": first.folder / "module/f.1.nbc",
        "manifest": root / "key.json",
    }
    DAMAGES[damage](path[target])
    n_before = compile_cache.n_damaged()

    healed = CompileCache(root, "key")
    assert healed.is_warm
    assert healed.folder != first.folder
    assert {name: (healed.folder / name).read_bytes() for name in FILES} == FILES
    assert child == [3, 3 if target == "manifest" else 1]
    assert compile_cache.n_damaged() == n_before + 1
    assert "were damaged and are made anew" in caplog.text
    assert CompileCache(root, "key").folder == healed.folder
    assert compile_cache.n_damaged() == n_before + 1


@pytest.mark.parametrize("manifest", [b"[]", b'{"folder": 3, "files": {}}', b'{"folder": "x"}', b"\xff"])
def test_a_manifest_that_says_something_else_means_a_cold_start(root, manifest):
    published(root)
    (root / "key.json").write_bytes(manifest)
    assert not CompileCache(root, "key").is_warm


def test_a_folder_that_others_may_write_is_not_believed(root, child):
    """What is loaded from it is run: not even what its manifest says counts."""
    CompileCache(root, "key")
    root.chmod(0o777)
    healed = CompileCache(root, "key")
    assert healed.is_warm
    assert root.stat().st_mode & 0o777 == 0o700
    assert child == [3, 3]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_another_users_folder_is_neither_used_nor_written(root, child):
    first = CompileCache(root, "key")
    os.chown(root, 12345, -1)
    alone = CompileCache(root, "key")
    assert not alone.is_warm
    assert alone.damage
    assert not alone.folder.is_relative_to(root)
    alone.publish()
    assert sorted(path.name for path in root.iterdir()) == sorted([first.folder.name, "key.json", "key.lock"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_folder_that_cannot_be_looked_into_is_told_of(root, child):
    CompileCache(root, "key")
    n_before = compile_cache.n_damaged()
    os.seteuid(12345)
    try:
        alone = CompileCache(root, "key")
    finally:
        os.seteuid(0)
    assert not alone.is_warm
    assert "Permission denied" in alone.damage
    assert compile_cache.n_damaged() == n_before + 1
    assert child == [3]


def test_another_keys_damage_does_not_matter(root, child):
    root.mkdir()
    (root / "another.json").write_bytes(b"{")
    assert CompileCache(root, "key").is_warm


def test_a_manifest_cannot_name_a_folder_elsewhere(root, tmp_path):
    cache = published(root)
    cache.folder.rename(tmp_path / "elsewhere")
    body = json.loads((root / "key.json").read_text()) | {"folder": "../elsewhere"}
    (root / "key.json").write_text(json.dumps(body))
    assert not CompileCache(root, "key").is_warm


def test_without_a_child_the_process_compiles_for_itself(root, monkeypatch):
    monkeypatch.delenv("KVFERRY_COMPILING_CHILD")
    monkeypatch.setattr(compile_cache.sys, "executable", "/bin/false")
    cache = CompileCache(root, "key")
    assert not cache.is_warm
    assert cache.folder.is_dir()


def test_another_clone_of_the_same_kernels_takes_what_is_compiled(tmp_path):
    """A release that is installed beside another one starts without compiling, unless a kernel changed."""
    program = """
import sys
from kvferry.engine.kernels.compile_cache import compile_cache
from kvferry.engine.kernels.jit import kernel
import doubling
twice = kernel(doubling.twice)
assert twice(21) == 42
compile_cache().publish()
print(sum(twice.stats.cache_hits.values()))
"""
    environment = os.environ | {"KVFERRY_CACHE": str(tmp_path / "cache"), "KVFERRY_COMPILING_CHILD": "1"}
    hits = []
    for release, body in (("first", "2 * n"), ("second", "2 * n"), ("third", "n + n")):
        (tmp_path / release / "kernels").mkdir(parents=True)
        (tmp_path / release / "kernels/doubling.py").write_text(f"def twice(n):\n    return {body}\n")
        path = f"{tmp_path / release / 'kernels'}:{Path(compile_cache.__file__).parents[3]}"
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        hits.append(int(done.stdout))
    assert hits == [0, 1, 0]


def test_the_key_knows_sources_and_processor(monkeypatch):
    before = compile_cache._key()
    assert compile_cache._key() == before
    monkeypatch.setattr(compile_cache.binding, "get_host_cpu_name", lambda: "another")
    assert compile_cache._key() != before


@pytest.mark.parametrize(
    ("machine", "features", "path"),
    [
        ("x86_64", {"avx2", "fma", "f16c"}, "avx2"),
        ("x86_64", {"avx2", "fma", "f16c", "avxvnni"}, "avxvnni"),
        (
            "x86_64",
            {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"},
            "avx512vnni",
        ),
        ("x86_64", {"sse2"}, "generic"),
        ("aarch64", {"neon", "dotprod"}, "neon-dotprod"),
        ("aarch64", {"neon"}, "generic"),
        ("riscv64", set(), "generic"),
    ],
)
def test_the_path_follows_the_processor(machine, features, path):
    assert choose_instruction_set(machine, features) == path
