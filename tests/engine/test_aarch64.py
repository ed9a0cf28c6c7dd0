"""The same bits on x86-64 and on AArch64, where the dot products are other instructions, on random cases too.

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
from dataclasses import dataclass
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
random_cases = load(PROJECT / "tests/engine/bit_contract/random_cases.py")

N_CASES = 60


def run(command: list[str], **environment: str) -> dict[str, Any]:
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@dataclass(frozen=True)
class Emulated:
    """How to start a program in an emulated Cortex-A76."""

    interpreter: list[str]
    environment: dict[str, str]


@pytest.fixture(scope="session")
def emulated() -> Emulated:
    root = arm64.default_root()
    missing = arm64.why_not(root)
    if missing:
        pytest.skip(missing)

    return Emulated(
        interpreter=arm64.interpreter(root),
        environment={
            "PYTHONPATH": f"{arm64.site_packages(root)}:{PROJECT / 'src'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "KVFERRY_CACHE": str(root.with_name("arm64-cache")),
            "KVFERRY_COMPILING_CHILD": "1",  # it compiles for itself: this machine's kernel starts no AArch64 child
        },
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_aarch64_computes_the_same_bits(emulated, tmp_path):
    model = tmp_path / "tiny.gguf"
    tiny.write_model(model, tiny.SHAPES["grouped by three"])
    there = run([*emulated.interpreter, str(PROGRAM), str(model)], **emulated.environment)
    here = run([sys.executable, str(PROGRAM), str(model)])
    assert there.pop("machine") == "aarch64"
    assert there.pop("kernel_path") == "neon-dotprod"
    assert there["blocks taken"] == [True] * 3
    assert there["damaged blocks taken"] == [False] * 3
    assert there == {name: value for name, value in here.items() if name not in {"machine", "kernel_path"}}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_aarch64_keeps_the_bit_contract_on_random_cases(emulated, first_seed):
    """Every architecture, KV kind and way to start; the yardstick is the generic path of this machine."""
    seeds = range(first_seed, first_seed + N_CASES)
    how = {"interpreter": emulated.interpreter, "environment": emulated.environment}
    found = random_cases.start(seeds, "neon-dotprod", is_plain=False, **how)
    assert found == random_cases.start(seeds, random_cases.YARDSTICK, is_plain=True), f"seeds {seeds}"
    assert all(len(digest) == random_cases.DIGEST_LENGTH for digest in found.values())


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
    ids=["dotprod", "i8mm", "neither", "nothing told"],
)
def test_the_kernel_says_what_an_arm_processor_has(words, features):
    assert arm_features(auxiliary_vector(**words)) == features


def test_without_dot_products_an_arm_processor_takes_the_generic_path():
    assert choose_instruction_set("aarch64", {"neon", "fp-armv8"}) == "generic"
    assert choose_instruction_set("aarch64", {"neon", "dotprod"}) == "neon-dotprod"
