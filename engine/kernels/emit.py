"""Kernels on their own, outside numba: their assembly for any processor, for tests and for people who tune them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llvmlite import binding, ir

from kvferry.engine.kernels import attention_ir, linear_ir
from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet

BuildKernel = Callable[[Any, InstructionSet, list[Any]], None]


@dataclass(frozen=True)
class Target:
    """A processor to emit for: LLVM's triple, CPU name and extra features."""

    triple: str
    cpu: str
    features: str = ""


TARGETS: Final = {
    "avx512vnni": Target("x86_64-unknown-linux-gnu", "sapphirerapids"),
    "avxvnni": Target("x86_64-unknown-linux-gnu", "alderlake"),
    "avx2": Target("x86_64-unknown-linux-gnu", "haswell"),
    "neon-dotprod": Target("aarch64-unknown-linux-gnu", "cortex-a76"),
}


def linear_kernel(
    kind: int, n_tokens: int, n_groups: int, part: tuple[int, int] | None = None
) -> tuple[int, BuildKernel]:
    """A linear tile as (number of i64 arguments, builder); ``part``: see LinearTile, None for the usual one."""

    def build(builder: Any, isa: InstructionSet, arguments: list[Any]) -> None:
        tile = linear_ir.linear_tile(isa, kind, n_tokens, n_groups)
        if part is not None:
            tile = linear_ir.LinearTile(kind, n_tokens, n_groups, *part)
        linear_ir.build_linear_tile(builder, isa, tile, linear_ir.LinearOperands(*arguments))

    return linear_ir.N_OPERANDS, build


def scores_kernel(n_rows: int) -> tuple[int, BuildKernel]:
    return 6, lambda builder, isa, arguments: attention_ir.build_scores(builder, isa, n_rows, *arguments)


def values_kernel(n_rows: int) -> tuple[int, BuildKernel]:
    return 8, lambda builder, isa, arguments: attention_ir.build_weighted_values(builder, isa, n_rows, *arguments)


def assembly(path: str, kernel: tuple[int, BuildKernel]) -> str:
    """The assembly of one kernel for the processor that a kernel path is meant for, optimised as numba does."""
    target = TARGETS[path]
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    binding.initialize_native_asmparser()
    n_arguments, build = kernel
    module = ir.Module("kernel")
    module.triple = target.triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [t.I64] * n_arguments), "kernel")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    build(builder, INSTRUCTION_SETS[path], list(function.args))
    builder.ret_void()
    machine = binding.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3
    )
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))
