"""Loads, stores, atomics and the processor's spin hint. Addresses are i64.

Atomics are sequentially consistent: who announces something and then looks whether anybody sleeps must not see the
past.
"""

from __future__ import annotations

import platform

from llvmlite import ir

from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels.ir_tools import Builder, Value


def build_load(builder: Builder, address: Value) -> Value:
    return t.load(builder, t.I64, t.at(builder, address), 8)


def build_load_int32(builder: Builder, address: Value) -> Value:
    return builder.sext(t.load(builder, t.I32, t.at(builder, address)), t.I64)


def build_store_int32(builder: Builder, address: Value, value: Value) -> None:
    t.store(builder, builder.trunc(value, t.I32), t.at(builder, address))


def build_copy(builder: Builder, target: Value, source: Value, n_bytes: Value) -> None:
    """Copy bytes between places that do not overlap."""
    pointers = [t.at(builder, address) for address in (target, source)]
    t.call(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), *pointers, n_bytes, t.int_constant(0, t.I1))


def build_store(builder: Builder, address: Value, value: Value) -> None:
    t.store(builder, value, t.at(builder, address), 8)


def build_load_byte(builder: Builder, address: Value) -> Value:
    return builder.zext(t.load(builder, t.I8, t.at(builder, address), 1), t.I64)


def build_atomic_load(builder: Builder, address: Value) -> Value:
    return builder.load_atomic(t.at(builder, address), "seq_cst", 8, typ=t.I64)


def build_atomic_add(builder: Builder, address: Value, amount: Value) -> Value:
    return builder.atomic_rmw("add", t.at(builder, address), amount, "seq_cst")


def build_atomic_or(builder: Builder, address: Value, bits: Value) -> Value:
    return builder.atomic_rmw("or", t.at(builder, address), bits, "seq_cst")


def build_atomic_exchange(builder: Builder, address: Value, value: Value) -> Value:
    return builder.atomic_rmw("xchg", t.at(builder, address), value, "seq_cst")


def build_spin_hint(builder: Builder, machine: str = platform.machine()) -> None:
    """Tell the processor that this is a spin loop, so that it saves power or lets its other thread run."""
    if machine in {"x86_64", "AMD64"}:
        t.call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif machine in {"aarch64", "arm64"}:
        t.call(builder, "llvm.aarch64.hint", ir.VoidType(), t.int_constant(1, t.I32))
