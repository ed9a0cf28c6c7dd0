"""The same bits on x86-64 and on AArch64, where the dot products are other instructions.

The AArch64 side runs in qemu-user, which emulates IEEE arithmetic faithfully and is not silicon. make_root.py in
tests/arm64 prepares it; the first run compiles all kernels under emulation, which takes minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvferry.engine.kernels.cpu_features import arm_features
from kvferry.engine.kernels.instruction_sets import choose_instruction_set

PROJECT = Path(__file__).parents[2]
PROGRAM = PROJECT / "tests/arm64/digests.py"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


tiny = load(PROJECT / "tests/engine/engine/tiny_models.py")
arm64 = load(PROJECT / "tests/arm64/make_root.py")


def run(command: list[str], **environment: str) -> dict[str, Any]:
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="session")
def emulated() -> Callable[[Path], dict[str, Any]]:
    """What the program says in an emulated Cortex-A76."""
    root = arm64.default_root()
    missing = arm64.why_not(root)
    if missing:
        pytest.skip(missing)

    def start(model: Path) -> dict[str, Any]:
        return run(
            [*arm64.interpreter(root), str(PROGRAM), str(model)],
            PYTHONPATH=f"{arm64.site_packages(root)}:{PROJECT / 'src'}",
            PYTHONDONTWRITEBYTECODE="1",
            KVFERRY_CACHE=str(root.with_name("arm64-cache")),
            KVFERRY_COMPILING_CHILD="1",  # it compiles for itself: the kernel of this machine starts no AArch64 child
        )

    return start


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_aarch64_computes_the_same_bits(emulated, tmp_path):
    model = tmp_path / "tiny.gguf"
    tiny.write_model(model, tiny.SHAPES["grouped by three"])
    there = emulated(model)
    here = run([sys.executable, str(PROGRAM), str(model)])
    assert there.pop("machine") == "aarch64"
    assert there.pop("kernel_path") == "neon-dotprod"
    assert there == {name: value for name, value in here.items() if name not in {"machine", "kernel_path"}}


def auxiliary_vector(**words: int) -> bytes:
    types = {"hwcap": 16, "hwcap2": 26, "page_size": 6}
    return b"".join(struct.pack("@LL", types[name], value) for name, value in words.items()) + bytes(16)


@pytest.mark.parametrize(
    ("words", "features"),
    [
        ({"hwcap": 1 << 20 | 0xFF, "hwcap2": 0}, {"dotprod"}),
        ({"page_size": 4096, "hwcap": 1 << 20, "hwcap2": 1 << 13}, {"dotprod", "i8mm"}),
        ({"hwcap": 0xFF, "hwcap2": 0}, set()),
        ({}, set()),
    ],
    ids=str,
)
def test_the_kernel_says_what_an_arm_processor_has(words, features):
    assert arm_features(auxiliary_vector(**words)) == features


def test_without_dot_products_an_arm_processor_takes_the_generic_path():
    assert choose_instruction_set("aarch64", {"neon", "fp-armv8"}) == "generic"
    assert choose_instruction_set("aarch64", {"neon", "dotprod"}) == "neon-dotprod"
