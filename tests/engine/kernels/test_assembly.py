"""What the compiler made of the kernels, for each processor family, cross-compiled.

The right instructions must be there, nothing may be fused that was not asked for, and the inner loop must keep its
accumulators in registers: a spilled one costs more than anything else in a kernel.
"""

from __future__ import annotations

import re

import pytest

from kvferry.engine.kernels import emit
from kvferry.engine.kernels.instruction_sets import INSTRUCTION_SETS
from kvferry.engine.kernels.layout import WEIGHT_FORMATS, WEIGHTS_Q6

DOT = {"avx512vnni": "vpdpbusd", "avxvnni": "vpdpbusd", "avx2": "vpmaddubsw", "neon-dotprod": "sdot"}
# In one block, 8 dot steps for each token and weight group; sdot does half a group of 8 rows.
STEPS = {"avx512vnni": 8, "avxvnni": 8, "avx2": 8, "neon-dotprod": 16}


def tiles(path: str) -> list[tuple[int, int, int]]:
    """Every tile that a kind of weights has on a kernel path."""
    return [(kind, *shape) for kind in WEIGHT_FORMATS for shape in INSTRUCTION_SETS[path].linear.all()]


def inner_loop(assembly: str) -> str:
    """The longest stretch from a label to a jump back to it: the loop over blocks or positions."""
    lines = assembly.splitlines()
    found = ""
    for i, line in enumerate(lines):
        label = re.match(r"(\.LBB\w+):", line)
        if not label:
            continue
        for j in range(len(lines) - 1, i, -1):
            if re.search(rf"\b(j\w+|b\.\w+|b|cbn?z|tbn?z)\b.*{re.escape(label[1])}$", lines[j]):
                body = "\n".join(lines[i : j + 1])
                found = max(found, body, key=len)
                break
    return found


@pytest.mark.parametrize(("path", "shape"), [(path, shape) for path in DOT for shape in tiles(path)], ids=str)
def test_a_linear_tile(path: str, shape: tuple[int, int, int]) -> None:
    kind, tokens, groups = shape
    loop = inner_loop(emit.assembly(path, emit.linear_kernel(kind, tokens, groups)))
    isa, form = INSTRUCTION_SETS[path], WEIGHT_FORMATS[kind]
    # vpdpbusd takes unsigned weights; what q6 adds to its own is taken off by the sums of half blocks, per token.
    parts_of_groups = groups // isa.linear.part(tokens, groups)[1]
    more = STEPS[path] * tokens * parts_of_groups if kind == WEIGHTS_Q6 and DOT[path] == "vpdpbusd" else 0
    assert len(re.findall(rf"\b{DOT[path]}\b", loop)) == STEPS[path] * tokens * groups + more
    # One fma for each scale and one for the minimum, per token and group and register of floats.
    registers = isa.group_rows // isa.float_lanes
    fused = re.findall(r"\b(?:vfn?m(?:add|sub)\d+ps|fml[as])\b", loop)
    assert len(fused) == (form.n_scales + form.has_minimum) * tokens * groups * registers
    assert vector_spills(loop) == 0


@pytest.mark.parametrize("path", DOT)
@pytest.mark.parametrize("make", [emit.scores_kernel, emit.values_kernel])
def test_an_attention_tile(path: str, make) -> None:
    isa = INSTRUCTION_SETS[path]
    assembly = emit.assembly(path, make(isa.attention_rows))
    assert len(re.findall(r"\b(?:vfmadd\d+ps|fmla)\b", assembly)) >= isa.attention_rows * 32 // isa.float_lanes
    loop = min((body for body in loops(assembly) if re.search(r"vfmadd|fmla", body)), key=len)
    assert vector_spills(loop) == 0


def loops(assembly: str) -> list[str]:
    lines, found = assembly.splitlines(), []
    for i, line in enumerate(lines):
        label = re.match(r"(\.LBB\w+):", line)
        if label:
            ends = [j for j in range(i, len(lines)) if re.search(rf"\b(j\w+|b\S*)\s+{re.escape(label[1])}$", lines[j])]
            found += ["\n".join(lines[i : j + 1]) for j in ends]
    return found


def vector_spills(loop: str) -> int:
    """Vector registers written to the stack inside the loop."""
    x86 = re.findall(r"\bvmov\S+\s+%[xyz]mm\d+, -?\d*\(%rsp\)", loop)
    arm = re.findall(r"\bst[rp]\s+q\d+.*\[sp", loop)
    return len(x86) + len(arm)
