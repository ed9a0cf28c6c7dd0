"""The IR builders as functions that jitted code can call, bound to this machine's instruction set.

All addresses, strides and counts are int64. A wrapper has no logic: what a kernel computes is written in its builder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import extending, types

from kvferry.engine.kernels import (
    attention_ir,
    digest_ir,
    kv_ir,
    linear_ir,
    sync_ir,
    transpose_ir,
    vector_ir,
    vision_ir,
)
from kvferry.engine.kernels.instruction_sets import host_instruction_set
from kvferry.engine.kernels.ir_tools import F16, F32, I8, I16, I32, I64, POINTER, Builder, Value, call, load, store

ISA: Final = host_instruction_set()

# A decorated function is called without its first parameter, which numba's own annotation does not know.
intrinsic: Final[Any] = extending.intrinsic
shaped_intrinsic: Final[Any] = extending.intrinsic(prefer_literal=True)  # with arguments that must be constants

_INT: Final = types.int64
_FLOAT: Final = types.float32
_NOTHING: Final = types.void


def _emit(result: Any, arguments: list[Any], build: Callable[..., Value | None]) -> tuple[Any, Any]:
    """The (signature, code generator) pair that numba's @intrinsic asks for."""

    def generate(context: Any, builder: Builder, _signature: Any, values: Any) -> Value:
        made = build(builder, *values)
        return context.get_dummy_value() if made is None else made

    return result(*arguments), generate


@shaped_intrinsic
def linear_tile(
    _context: Any,
    kind: Any,
    n_tokens: Any,
    n_groups: Any,
    weights: Any,
    group_stride: Any,
    n_blocks: Any,
    activations: Any,
    activation_stride: Any,
    output: Any,
    output_stride: Any,
    output_group_stride: Any,
    accumulate: Any,
    ahead: Any,
    n_ahead: Any,
) -> Any:
    """The linear tile of linear_ir.py; the first three arguments, which fix its shape, are constants."""
    shape = [kind, n_tokens, n_groups]
    tile = linear_ir.linear_tile(ISA, *(argument.literal_value for argument in shape))

    def build(builder: Builder, *values: Value) -> None:
        linear_ir.build_linear_tile(builder, ISA, tile, linear_ir.LinearOperands(*values[3:]))

    return _emit(_NOTHING, [*shape, *[_INT] * linear_ir.N_OPERANDS], build)


def _call(builder: Builder, address: Value, *values: Value) -> None:
    function = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(builder.inttoptr(address, function.as_pointer()), values)


@intrinsic
def call_linear(
    _context: Any,
    function: Any,
    weights: Any,
    n_blocks: Any,
    first_unit: Any,
    n_units: Any,
    x: Any,
    x_stride: Any,
    n_rows: Any,
    y: Any,
    y_stride: Any,
    accumulate: Any,
) -> Any:
    """Call what is compiled for one kind of weights (linear.py) by its address; so is the next."""
    return _emit(_NOTHING, [_INT] * 11, _call)


@intrinsic
def call_unpack_row(_context: Any, function: Any, weights: Any, n_blocks: Any, row: Any, y: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 5, _call)


def make_scores(n_rows: int) -> Any:
    @intrinsic
    def scores_tile(_context: Any, q: Any, head_dim: Any, k_tile: Any, scores: Any, ahead: Any, ahead_step: Any) -> Any:
        def build(builder: Builder, *values: Value) -> None:
            attention_ir.build_scores(builder, ISA, n_rows, *values)

        return _emit(_NOTHING, [_INT] * 6, build)

    return scores_tile


def make_weighted_values(n_rows: int) -> Any:
    @intrinsic
    def values_tile(
        _context: Any,
        weights: Any,
        n_valid: Any,
        v_tile: Any,
        head_dim: Any,
        rescale: Any,
        output: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        def build(builder: Builder, *values: Value) -> None:
            attention_ir.build_weighted_values(builder, ISA, n_rows, *values)

        return _emit(_NOTHING, [_INT] * 8, build)

    return values_tile


@intrinsic
def row_maximum(_context: Any, n_valid: Any, scores: Any, old: Any, new: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 4, attention_ir.build_row_maximum)


@intrinsic
def rescales_of(_context: Any, n_rows: Any, maxima: Any, rescales: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 3, attention_ir.build_rescales)


@intrinsic
def row_weights(_context: Any, n_valid: Any, scores: Any, maximum: Any, rescale: Any, sums: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 5, attention_ir.build_row_weights)


@intrinsic
def attention_output(
    _context: Any, output: Any, head_blocks: Any, sums: Any, row: Any, n_blocks: Any, first_block: Any
) -> Any:
    return _emit(_NOTHING, [_INT] * 6, attention_ir.build_attention_output)


@intrinsic
def norm_quantise(_context: Any, x: Any, weight: Any, n_blocks: Any, epsilon: Any, row: Any) -> Any:
    return _emit(_NOTHING, [_INT, _INT, _INT, _FLOAT, _INT], vector_ir.build_norm_quantise)


@intrinsic
def norm_floats(_context: Any, x: Any, weight: Any, n_blocks: Any, epsilon: Any, out: Any) -> Any:
    return _emit(_NOTHING, [_INT, _INT, _INT, _FLOAT, _INT], vector_ir.build_norm)


@intrinsic
def dot_floats(_context: Any, x: Any, y: Any, n_blocks: Any) -> Any:
    return _emit(_FLOAT, [_INT] * 3, vector_ir.build_dot)


@intrinsic
def exp_float(_context: Any, x: Any) -> Any:
    return _emit(_FLOAT, [_FLOAT], vector_ir.exp)


@intrinsic
def add_floats(_context: Any, target: Any, source: Any, n_blocks: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 3, vector_ir.build_add)


@intrinsic
def add_scaled(_context: Any, target: Any, source: Any, factor: Any, n_blocks: Any) -> Any:
    return _emit(_NOTHING, [_INT, _INT, _FLOAT, _INT], vector_ir.build_add_scaled)


@intrinsic
def copy_bytes(_context: Any, target: Any, source: Any, n_bytes: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 3, sync_ir.build_copy)


@intrinsic
def xxh3_128(_context: Any, data: Any, n_bytes: Any, out: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 3, digest_ir.build_xxh3_128)


@intrinsic
def copy_xxh3_128(_context: Any, data: Any, n_bytes: Any, target: Any, out: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 4, digest_ir.build_copy_xxh3_128)


@intrinsic
def transpose(_context: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 4, transpose_ir.build_transpose)


@intrinsic
def read_vector(_context: Any, fd: Any, buffers: Any, n_buffers: Any, offset: Any) -> Any:
    """preadv(2) with int64 arguments: bytes read, or -1."""

    def build(builder: Builder, fd: Value, buffers: Value, n_buffers: Value, offset: Value) -> Value:
        narrow = (builder.trunc(fd, I32), builder.inttoptr(buffers, POINTER), builder.trunc(n_buffers, I32))
        return call(builder, "preadv", I64, *narrow, offset)

    return _emit(_INT, [_INT] * 4, build)


@intrinsic
def layer_norm(_context: Any, x: Any, weight: Any, bias: Any, n_blocks: Any, epsilon: Any, out: Any) -> Any:
    return _emit(_NOTHING, [_INT, _INT, _INT, _INT, _FLOAT, _INT], vision_ir.build_layer_norm)


@intrinsic
def gelu_tanh(_context: Any, x: Any, n_blocks: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 2, vision_ir.build_gelu_tanh)


@intrinsic
def gelu_erf(_context: Any, x: Any, n_blocks: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 2, vision_ir.build_gelu_erf)


@intrinsic
def quantise_floats(_context: Any, x: Any, n_blocks: Any, row: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 3, vision_ir.build_quantise)


@intrinsic
def gated_quantise(_context: Any, gate: Any, up: Any, row: Any, n_blocks: Any, block: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 5, vector_ir.build_gated_quantise)


@intrinsic
def rope(_context: Any, x: Any, table: Any, half: Any, scale: Any, out: Any) -> Any:
    return _emit(_NOTHING, [_INT, _INT, _INT, _FLOAT, _INT], vector_ir.build_rope)


@intrinsic
def load_float(_context: Any, address: Any) -> Any:
    return _emit(_FLOAT, [_INT], lambda b, address: load(b, F32, b.inttoptr(address, POINTER)))


@intrinsic
def store_float(_context: Any, address: Any, value: Any) -> Any:
    return _emit(_NOTHING, [_INT, _FLOAT], lambda b, address, value: store(b, value, b.inttoptr(address, POINTER)))


@intrinsic
def head_to_half(_context: Any, head: Any, n_blocks: Any, out: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 3, kv_ir.build_head_to_half)


@intrinsic
def head_to_q8(_context: Any, head: Any, n_blocks: Any, out: Any, scale_out: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 4, kv_ir.build_head_to_q8)


@intrinsic
def widen_half(_context: Any, source: Any, n_blocks: Any, out: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 3, kv_ir.build_widen_half)


@intrinsic
def widen_q8_keys(_context: Any, source: Any, head_dim: Any, out: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 3, kv_ir.build_widen_q8_keys)


@intrinsic
def widen_q8_values(_context: Any, source: Any, head_dim: Any, out: Any) -> Any:
    return _emit(_NOTHING, [_INT] * 3, kv_ir.build_widen_q8_values)


@intrinsic
def load_half(_context: Any, address: Any) -> Any:
    """A float16 from memory, widened (which is exact)."""
    return _emit(_FLOAT, [_INT], lambda b, address: b.fpext(load(b, F16, b.inttoptr(address, POINTER), 2), F32))


@intrinsic
def load_int(_context: Any, address: Any) -> Any:
    return _emit(_INT, [_INT], sync_ir.build_load)


@intrinsic
def store_int(_context: Any, address: Any, value: Any) -> Any:
    return _emit(_NOTHING, [_INT, _INT], sync_ir.build_store)


@intrinsic
def load_int32(_context: Any, address: Any) -> Any:
    return _emit(_INT, [_INT], sync_ir.build_load_int32)


@intrinsic
def store_int32(_context: Any, address: Any, value: Any) -> Any:
    return _emit(_NOTHING, [_INT, _INT], sync_ir.build_store_int32)


@intrinsic
def load_word(_context: Any, address: Any) -> Any:
    """Four bytes at any address as an unsigned number."""
    return _emit(_INT, [_INT], lambda b, address: b.zext(load(b, I32, b.inttoptr(address, POINTER), 1), I64))


@intrinsic
def load_int16(_context: Any, address: Any) -> Any:
    return _emit(_INT, [_INT], lambda b, address: b.sext(load(b, I16, b.inttoptr(address, POINTER), 2), I64))


@intrinsic
def store_int16(_context: Any, address: Any, value: Any) -> Any:
    """The low two bytes of the value."""
    return _emit(
        _NOTHING, [_INT, _INT], lambda b, address, value: store(b, b.trunc(value, I16), b.inttoptr(address, POINTER), 2)
    )


@intrinsic
def store_byte(_context: Any, address: Any, value: Any) -> Any:
    """The low byte of the value."""
    return _emit(
        _NOTHING, [_INT, _INT], lambda b, address, value: store(b, b.trunc(value, I8), b.inttoptr(address, POINTER), 1)
    )


@intrinsic
def load_byte(_context: Any, address: Any) -> Any:
    """A byte as an unsigned number."""
    return _emit(_INT, [_INT], sync_ir.build_load_byte)


@intrinsic
def atomic_load(_context: Any, address: Any) -> Any:
    return _emit(_INT, [_INT], sync_ir.build_atomic_load)


@intrinsic
def atomic_add(_context: Any, address: Any, amount: Any) -> Any:
    """Add and return what was there before."""
    return _emit(_INT, [_INT, _INT], sync_ir.build_atomic_add)


@intrinsic
def atomic_or(_context: Any, address: Any, bits: Any) -> Any:
    """Set bits and return what was there before."""
    return _emit(_INT, [_INT, _INT], sync_ir.build_atomic_or)


@intrinsic
def atomic_exchange(_context: Any, address: Any, value: Any) -> Any:
    """Store and return what was there before."""
    return _emit(_INT, [_INT, _INT], sync_ir.build_atomic_exchange)


@intrinsic
def spin_hint(_context: Any) -> Any:
    return _emit(_NOTHING, [], sync_ir.build_spin_hint)
