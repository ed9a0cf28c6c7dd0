"""Compiled kernels are used whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.engine.kernels import compile_cache
from kvferry.engine.kernels.compile_cache import CompileCache
from kvferry.engine.kernels.instruction_sets import choose_instruction_set


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


@pytest.mark.parametrize("damage", [b"", b"machine cod", b"machine code!", b"Machine code"])
def test_a_torn_or_flipped_file_is_never_loaded(root, damage):
    first = published(root)
    (first.folder / "module" / "f.1.nbc").write_bytes(damage)
    second = CompileCache(root, "key")
    assert not second.is_warm
    assert second.folder != first.folder


@pytest.mark.parametrize("manifest", [b"", b"{", b"[]", b'{"folder": 3, "files": {}}', b'{"folder": "x"}', b"\xff"])
def test_a_damaged_manifest_means_a_cold_start(root, manifest):
    published(root)
    (root / "key.json").write_bytes(manifest)
    assert not CompileCache(root, "key").is_warm


def test_a_missing_file_means_a_cold_start(root):
    (published(root).folder / "module" / "f.nbi").unlink()
    assert not CompileCache(root, "key").is_warm


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
