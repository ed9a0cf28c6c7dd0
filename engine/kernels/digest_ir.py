"""XXH3-128 of long inputs (over 240 bytes), seed 0, as xxHash's specification defines it: eight 64-bit sums that every
stripe of 64 bytes is mixed into, mixed once more after each 1,024 bytes, and folded into 128 bits at the end.

The sums are one vector, so a stripe costs a handful of instructions on a processor with wide vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llvmlite import ir

from kvferry.engine.kernels import ir_tools as t
from kvferry.engine.kernels.ir_tools import I32, I64, Builder, Value

SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
LONG_BYTES: Final = 240  # shorter inputs have other rules
DIGEST_BYTES: Final = 16
STRIPE_BYTES: Final = 64

_SECRET_STEP: Final = 8  # from one stripe to the next
_SECRET_SIZE: Final = 192
_STRIPES: Final = (_SECRET_SIZE - STRIPE_BYTES) // _SECRET_STEP  # in a block: until the secret is used up
_BLOCK: Final = _STRIPES * STRIPE_BYTES
_LAST_SECRET: Final = _SECRET_SIZE - STRIPE_BYTES - 7
_LOW_SECRET: Final = 11
_HIGH_SECRET: Final = _SECRET_SIZE - STRIPE_BYTES - 11

_PRIME32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_AVALANCHE: Final = 0x165667919E3779F9
_START: Final = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])

_SUMS: Final = t.vector(I64, 8)
_WIDE: Final = ir.IntType(128)
_SWAPPED: Final = [1, 0, 3, 2, 5, 4, 7, 6]


def _words(offset: int) -> Value:
    """Eight 64-bit words of the secret."""
    return ir.Constant(_SUMS, [_word(offset + 8 * lane) for lane in range(8)])


def _word(offset: int) -> int:
    return int.from_bytes(SECRET[offset : offset + 8], "little")


def _mix_stripe(builder: Builder, sums: Value, words: Value, secret: Value) -> Value:
    """Each lane gets its neighbour's word, and the product of the halves of its own, keyed."""
    keyed = builder.xor(words, secret)
    low = builder.and_(keyed, t.constant(_SUMS, 0xFFFFFFFF))
    product = builder.mul(low, builder.lshr(keyed, t.constant(_SUMS, 32)))
    return builder.add(builder.add(sums, t.shuffle(builder, words, _SWAPPED)), product)


def _scramble(builder: Builder, sums: Value) -> Value:
    mixed = builder.xor(sums, builder.lshr(sums, t.constant(_SUMS, 47)))
    keyed = builder.xor(mixed, _words(_SECRET_SIZE - STRIPE_BYTES))
    return builder.mul(keyed, t.constant(_SUMS, _PRIME32[0]))


def _folded_product(builder: Builder, a: Value, b: Value) -> Value:
    """The two halves of the 128-bit product, xor-ed."""
    product = builder.mul(builder.zext(a, _WIDE), builder.zext(b, _WIDE))
    high = builder.lshr(product, ir.Constant(_WIDE, 64))
    return builder.xor(builder.trunc(product, I64), builder.trunc(high, I64))


def _shift_xor(builder: Builder, x: Value, bits: int) -> Value:
    return builder.xor(x, builder.lshr(x, t.int_constant(bits)))


def _fold(builder: Builder, sums: Value, secret: int, start: Value) -> Value:
    """64 of the digest's bits."""
    keyed = builder.xor(sums, _words(secret))
    lanes = [builder.extract_element(keyed, t.int_constant(lane, I32)) for lane in range(8)]
    result = start
    for lane in range(0, 8, 2):
        result = builder.add(result, _folded_product(builder, lanes[lane], lanes[lane + 1]))
    return _shift_xor(builder, builder.mul(_shift_xor(builder, result, 37), t.int_constant(_AVALANCHE)), 32)


def build_copy_xxh3_128(builder: Builder, data: Value, n_bytes: Value, target: Value, out: Value) -> None:
    """The digest of ``n_bytes`` > 240 at ``data``, whole stripes, which are copied to ``target`` meanwhile.

    ``out``: 16 bytes in canonical (big-endian) order. ``target`` is on a stripe's border, and other threads see it
    when this is done.
    """
    way = builder.sub(target, data)

    def load(at: Value, offset: int | Value) -> Value:
        """A stripe, copied."""
        words = t.load(builder, _SUMS, t.at(builder, at, offset), align=1)
        t.store_past_cache(builder, words, t.at(builder, builder.add(at, way), offset), align=STRIPE_BYTES)
        return words

    _build_xxh3_128(builder, load, (data, n_bytes), out)
    builder.fence("seq_cst")


def build_xxh3_128(builder: Builder, data: Value, n_bytes: Value, out: Value) -> None:
    """The digest of ``n_bytes`` > 240 at ``data``: 16 bytes at ``out`` in canonical (big-endian) order."""

    def load(at: Value, offset: int | Value) -> Value:
        return t.load(builder, _SUMS, t.at(builder, at, offset), align=1)

    _build_xxh3_128(builder, load, (data, n_bytes), out)


def _build_xxh3_128(
    builder: Builder, load: Callable[[Value, int | Value], Value], of: tuple[Value, Value], out: Value
) -> None:
    """``load(address, offset)`` gives the stripe there, and is asked once for each that begins at a multiple of 64."""
    data, n_bytes = of
    sums = t.variable(builder, _SUMS, ir.Constant(_SUMS, list(_START)), "sums")
    before_last = builder.sub(n_bytes, t.int_constant(1))
    n_blocks = builder.udiv(before_last, t.int_constant(_BLOCK))

    def one_block(block: Value) -> None:
        at = builder.add(data, t.scaled(builder, block, _BLOCK))
        mixed = t.value_of(builder, sums)
        for stripe in range(_STRIPES):
            mixed = _mix_stripe(builder, mixed, load(at, stripe * STRIPE_BYTES), _words(stripe * _SECRET_STEP))
        builder.store(_scramble(builder, mixed), sums)

    t.counted_loop(builder, n_blocks, one_block, "blocks")
    rest = builder.add(data, t.scaled(builder, n_blocks, _BLOCK))
    n_rest = builder.udiv(builder.sub(before_last, t.scaled(builder, n_blocks, _BLOCK)), t.int_constant(STRIPE_BYTES))
    secrets = builder.ptrtoint(_secret_in_memory(builder), I64)

    def one_stripe(stripe: Value) -> None:
        secret = t.at(builder, secrets, t.scaled(builder, stripe, _SECRET_STEP))
        words = load(rest, t.scaled(builder, stripe, STRIPE_BYTES))
        keyed = t.load(builder, _SUMS, secret, align=1)
        builder.store(_mix_stripe(builder, t.value_of(builder, sums), words, keyed), sums)

    t.counted_loop(builder, n_rest, one_stripe, "stripes")
    last = load(builder.add(data, n_bytes), -STRIPE_BYTES)
    done = _mix_stripe(builder, t.value_of(builder, sums), last, _words(_LAST_SECRET))
    low = _fold(builder, done, _LOW_SECRET, builder.mul(n_bytes, t.int_constant(_PRIME64[0])))
    inverted = builder.not_(builder.mul(n_bytes, t.int_constant(_PRIME64[1])))
    high = _fold(builder, done, _HIGH_SECRET, inverted)
    for offset, half in ((0, high), (8, low)):
        t.store(builder, t.call(builder, "llvm.bswap.i64", I64, half), t.at(builder, out, offset), align=1)


def _secret_in_memory(builder: Builder) -> Value:
    """The secret as the module's own constant."""
    name, kind = "xxh3_secret", ir.ArrayType(t.I8, len(SECRET))
    secret = builder.module.globals.get(name)
    if secret is None:
        secret = ir.GlobalVariable(builder.module, kind, name)
        secret.linkage, secret.global_constant = "internal", True
        secret.initializer = ir.Constant(kind, bytearray(SECRET))
    return secret
