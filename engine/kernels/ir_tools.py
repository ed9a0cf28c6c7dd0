"""Small vocabulary over llvmlite's IRBuilder that all kernel builders share.

Addresses are i64 values throughout: the jitted callers compute with them as plain integers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

I1: Final = ir.IntType(1)
I8: Final = ir.IntType(8)
I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
F16: Final = ir.HalfType()
F32: Final = ir.FloatType()
POINTER: Final = ir.PointerType()

Builder = Any  # ir.IRBuilder; llvmlite ships no types
Value = Any  # ir.Value
Type = Any  # ir.Type


def vector(element: Type, lanes: int) -> Type:
    return ir.VectorType(element, lanes)


def float_vector(lanes: int) -> Type:
    return ir.VectorType(F32, lanes)


def int_constant(value: int, bits: Type = I64) -> Value:
    return ir.Constant(bits, value)


def constant(kind: Type, value: float) -> Value:
    """A scalar constant, or a vector with the same value in every lane; floats are rounded to float32 first."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    if element == F32:
        value = struct.unpack("f", struct.pack("f", value))[0]
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


def index_vector(values: list[int]) -> Value:
    return ir.Constant(vector(I32, len(values)), values)


def splat(builder: Builder, scalar: Value, lanes: int) -> Value:
    """The scalar in every lane."""
    kind = vector(scalar.type, lanes)
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, int_constant(0, I32))
    return builder.shuffle_vector(first, undefined, index_vector([0] * lanes))


def shuffle(builder: Builder, source: Value, lanes: list[int]) -> Value:
    """Lane i of the result is lane ``lanes[i]`` of the source."""
    return builder.shuffle_vector(source, ir.Constant(source.type, ir.Undefined), index_vector(lanes))


def concatenate(builder: Builder, low: Value, high: Value) -> Value:
    return builder.shuffle_vector(low, high, index_vector(list(range(low.type.count + high.type.count))))


def at(builder: Builder, address: Value, offset: Value | int = 0) -> Value:
    """The pointer ``offset`` bytes beyond an i64 address."""
    if isinstance(offset, int):
        offset = int_constant(offset)
        return builder.inttoptr(builder.add(address, offset) if offset.constant else address, POINTER)
    return builder.inttoptr(builder.add(address, offset), POINTER)


def beyond(builder: Builder, pointer: Value, offset: int) -> Value:
    """The pointer ``offset`` bytes beyond another."""
    return builder.gep(pointer, [int_constant(offset)], source_etype=I8)


def scaled(builder: Builder, value: Value, factor: int) -> Value:
    return builder.mul(value, int_constant(factor))


def load(builder: Builder, kind: Type, pointer: Value, align: int = 4) -> Value:
    return builder.load(pointer, align=align, typ=kind)


def store(builder: Builder, value: Value, pointer: Value, align: int = 4) -> None:
    builder.store(value, pointer, align=align)


def store_past_cache(builder: Builder, value: Value, pointer: Value, align: int) -> None:
    """Store what will not be read soon: memory is written without being read first. ``align``: the vector's size."""
    written = builder.store(value, pointer, align=align)
    written.set_metadata("nontemporal", builder.module.add_metadata([int_constant(1, I32)]))


def load_splat(builder: Builder, pointer: Value, lanes: int) -> Value:
    """One float32 from memory in every lane (a broadcast load where the machine has one)."""
    return splat(builder, load(builder, F32, pointer), lanes)


def prefetch(builder: Builder, pointer: Value) -> None:
    """Ask for the cache line at the pointer, to be read soon. Any address is allowed."""
    to_read, keep, data = (int_constant(value, I32) for value in (0, 3, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, to_read, keep, data)


def variable(builder: Builder, kind: Type, initial: Value, name: str = "") -> Value:
    """A local variable; LLVM turns it into a register. Created in the entry block, set here."""
    with builder.goto_entry_block():
        slot = builder.alloca(kind, name=name)
    builder.store(initial, slot)
    return slot


def value_of(builder: Builder, slot: Value) -> Value:
    return builder.load(slot, typ=slot.allocated_type)


def call(builder: Builder, name: str, result: Type, *arguments: Value) -> Value:
    """Call an intrinsic or external function by name, declaring it on first use."""
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(result, [value.type for value in arguments]), name)
    return builder.call(function, list(arguments))


def _suffix(kind: Type) -> str:
    return f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"


def fma(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """a * b + c with one rounding. The only way a fused operation enters the model path."""
    return call(builder, f"llvm.fma.{_suffix(a.type)}", a.type, a, b, c)


def fma_in_place(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """fma for x86, in the register of c, and in the order of the program.

    Left to LLVM, a loop's sum moves into the register of a and is copied back at the end, which takes so many registers
    more that sums are spilled.
    """
    kind = ir.FunctionType(c.type, [c.type] * 3)
    return builder.call(ir.InlineAsm(kind, "vfmadd231ps $3, $2, $0", "=v,0,v,v", side_effect=True), [c, a, b])


def absolute(builder: Builder, x: Value) -> Value:
    return call(builder, f"llvm.fabs.{_suffix(x.type)}", x.type, x)


def square_root(builder: Builder, x: Value) -> Value:
    return call(builder, f"llvm.sqrt.{_suffix(x.type)}", x.type, x)


def round_half_even(builder: Builder, x: Value) -> Value:
    return call(builder, f"llvm.roundeven.{_suffix(x.type)}", x.type, x)


def larger(builder: Builder, a: Value, b: Value) -> Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def fold_halves(builder: Builder, x: Value, combine: Callable[[Builder, Value, Value], Value]) -> Value:
    """Reduce a vector to a scalar: lane i with lane i + n/2, then the same on the n/2 lanes left, down to one."""
    lanes = x.type.count
    while lanes > 1:
        lanes //= 2
        low = shuffle(builder, x, list(range(lanes)))
        high = shuffle(builder, x, list(range(lanes, 2 * lanes)))
        x = combine(builder, low, high)
    return builder.extract_element(x, int_constant(0, I32))


def add(builder: Builder, a: Value, b: Value) -> Value:
    return builder.fadd(a, b)


def counted_loop(builder: Builder, count: Value, body: Callable[[Value], None], name: str = "loop") -> None:
    """Run ``body(i)`` for i = 0 .. count - 1 (i64); the builder stands behind the loop afterwards."""
    before = builder.block
    condition = builder.append_basic_block(f"{name}.condition")
    inside = builder.append_basic_block(f"{name}.body")
    behind = builder.append_basic_block(f"{name}.end")
    builder.branch(condition)
    builder.position_at_end(condition)
    index = builder.phi(I64, f"{name}.index")
    index.add_incoming(int_constant(0), before)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, behind)
    builder.position_at_end(inside)
    body(index)
    index.add_incoming(builder.add(index, int_constant(1)), builder.block)
    builder.branch(condition)
    builder.position_at_end(behind)


def keep_order(builder: Builder) -> None:
    """Forbid LLVM to move loads across this point: hoisting them all to the top of a block is what spills registers."""
    kind = ir.FunctionType(ir.VoidType(), [])
    builder.call(ir.InlineAsm(kind, "", "~{memory}", side_effect=True), [])


def pin(builder: Builder, value: Value, register_class: str) -> Value:
    """The same value (or tuple of values), behind a point that loads and its computation cannot cross."""
    if isinstance(value, tuple):
        return tuple(pin(builder, part, register_class) for part in value)
    kind = ir.FunctionType(value.type, [value.type])
    asm = ir.InlineAsm(kind, "", f"={register_class},0,~{{memory}}", side_effect=True)
    return builder.call(asm, [value])
