"""The bit contract on random cases: 200 a run on small models of every architecture, a few on the real one.

Chunks, threads, batch mixes, images, rows restored, forked or shared, and instruction sets change no bit of any logit
or K/V row, whatever the cache stores. Other seeds every run; the header and a failure name them (random_cases.py).
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "random_cases.py"
N_REAL_CASES = 8
N_SLOW_CASES = 1000


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


random_cases = load(PROGRAM)


def how_to_repeat(seed: int, *words: str) -> str:
    return f"python tests/engine/bit_contract/{PROGRAM.name} {' '.join([str(seed), *words])}"


@pytest.fixture(scope="module")
def verdicts(first_seed: int) -> dict[int, Any]:
    return random_cases.judge(range(first_seed, first_seed + random_cases.N_CASES))


@pytest.mark.parametrize("number", range(random_cases.N_CASES))
def test_a_random_case(verdicts, first_seed, number):
    verdict = verdicts[first_seed + number]
    assert verdict.is_kept, f"{verdict}; {how_to_repeat(first_seed + number)}"


def test_a_random_case_of_the_real_model(smollm2_path, first_seed):
    verdicts = random_cases.judge(range(first_seed, first_seed + N_REAL_CASES), is_real=True)
    broken = [str(verdict) for verdict in verdicts.values() if not verdict.is_kept]
    assert not broken, f"{broken}; {how_to_repeat(first_seed, str(N_REAL_CASES), '--real')}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_more(first_seed):
    start = first_seed + random_cases.N_CASES
    verdicts = random_cases.judge(range(start, start + N_SLOW_CASES))
    broken = [str(verdict) for verdict in verdicts.values() if not verdict.is_kept]
    assert not broken, f"{broken}; {how_to_repeat(start, str(N_SLOW_CASES))}"


def test_a_seed_draws_the_same_case_always_and_all_of_them_draw_everything():
    """What the contract names is met by any 200 seeds."""
    cases = [random_cases.draw(seed) for seed in range(200)]
    again = random_cases.draw(7)
    assert again.tokens.tobytes() == cases[7].tokens.tobytes()
    assert str(again) == str(cases[7])
    for field, wanted in {
        "model": set(random_cases.RECIPES),
        "kv": set(random_cases.KvKind),
        "n_threads": {1, 2, 3},
        "beside": {0, 1, 2, 3},
        "start": {"computed", "restored", "forked", "adopted"},
    }.items():
        assert set(Counter(getattr(case, field) for case in cases)) == wanted
    assert {1, 7, 32, 33, 512} <= {case.sizes[0] for case in cases if len(case.sizes) == 1}
    assert sum(len(case.sizes) > 1 for case in cases) > 10
    assert {0, 1, 2} == {len(case.grids) for case in cases}


def test_every_kernel_path_that_a_processor_has_takes_part():
    server = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"}
    assert random_cases.runnable_paths(server, "avx512vnni") == ["avx512vnni", "avx2", "avxvnni", "generic"]
    assert random_cases.runnable_paths({"avx2", "fma", "f16c"}, "avx2") == ["avx2", "generic"]
    assert random_cases.runnable_paths({"neon", "dotprod"}, "neon-dotprod") == ["neon-dotprod", "generic"]
    assert random_cases.runnable_paths(set(), "generic") == ["generic"]
