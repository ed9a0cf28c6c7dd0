"""Every kernel against the definition of its arithmetic, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from kvferry.engine.files.tensors import StoredRows
from kvferry.engine.kernels import definition
from kvferry.engine.kernels import intrinsics as kernels
from kvferry.engine.kernels.attention import softmax_step
from kvferry.engine.kernels.attention_ir import RESCALE_LANES
from kvferry.engine.kernels.experts import route
from kvferry.engine.kernels.layout import (
    QUANT_BLOCK,
    activation_row_bytes,
    weight_block_bytes,
)
from kvferry.engine.kernels.linear import GROUP_ROWS, UNIT_ROWS, kernels_of, linear, unpack_row
from kvferry.engine.memory import aligned_empty
from kvferry.engine.packing import pack_rows
from kvferry.engine.packing_kinds import STORED_KINDS

pytestmark = pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPerformanceWarning")

spec = importlib.util.spec_from_file_location("gguf_blocks", Path(__file__).parents[1] / "gguf_blocks.py")
blocks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks)


@njit
def run_norm(x, weight, n_blocks, epsilon, row):
    kernels.norm_quantise(x, weight, n_blocks, epsilon, row)


@njit
def run_gated(gate, up, row, n_blocks, block):
    kernels.gated_quantise(gate, up, row, n_blocks, block)


@njit
def run_rope(x, table, half, scale, out):
    kernels.rope(x, table, half, scale, out)


@njit
def run_float_norm(x, weight, n_blocks, epsilon, out):
    kernels.norm_floats(x, weight, n_blocks, epsilon, out)


@njit
def run_dot(x, y, n_blocks):
    return kernels.dot_floats(x, y, n_blocks)


def address(array: NDArray) -> int:
    return array.ctypes.data


def same_bits(a: NDArray, b: NDArray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


class ActivationRows:
    """Quantised rows in memory as the kernels lay them out."""

    def __init__(self, n_rows: int, n_elements: int) -> None:
        self.n_blocks = n_elements // QUANT_BLOCK
        self.stride = activation_row_bytes(n_elements)
        self.bytes = aligned_empty(n_rows * self.stride).reshape(n_rows, self.stride)

    def row(self, i: int) -> int:
        return address(self.bytes) + i * self.stride

    @property
    def values(self) -> NDArray[np.int8]:
        return self.bytes[:, : self.n_blocks * 32].view(np.int8)

    @property
    def scales(self) -> NDArray[np.float32]:
        return self.bytes[:, self.n_blocks * 32 : self.n_blocks * 40].view(np.float32)

    @property
    def offsets(self) -> NDArray[np.int32]:
        return self.bytes[:, self.n_blocks * 40 : self.n_blocks * 44].view(np.int32)

    def hold(self, x: NDArray[np.float32]) -> None:
        """Check that these rows are exactly the quantised x."""
        values, scale = definition.quantise(x)
        sums = values.reshape(len(x), -1, 32).astype(np.int32).sum(axis=-1)
        assert same_bits(self.values, values)
        assert same_bits(self.scales[:, ::2], scale)
        assert same_bits(self.scales[:, 1::2], scale * sums.astype(np.float32))
        assert np.array_equal(self.offsets, -128 * sums)


def quantised(x: NDArray[np.float32]) -> ActivationRows:
    """x as activation rows, by way of a norm that changes nothing but the scale of a row."""
    rows = ActivationRows(*x.shape)
    values, scale = definition.quantise(x)
    sums = values.reshape(len(x), -1, 32).astype(np.int32).sum(axis=-1)
    rows.values[:] = values
    rows.scales[:, ::2] = scale
    rows.scales[:, 1::2] = scale * sums.astype(np.float32)
    rows.offsets[:] = -128 * sums
    return rows


def weights(kind: str, n_rows: int, n_cols: int) -> StoredRows:
    return StoredRows((n_rows, n_cols), kind, blocks.random_rows(kind, n_rows, n_cols))


def packed(tensor: StoredRows) -> NDArray[np.uint8]:
    n_rows, n_cols = tensor.shape
    kind = STORED_KINDS[tensor.kind]
    n_groups = -(-n_rows // UNIT_ROWS) * UNIT_ROWS // GROUP_ROWS
    shape = (n_groups, n_cols // 32, weight_block_bytes(kind, GROUP_ROWS))
    out = aligned_empty(int(np.prod(shape))).reshape(shape)
    pack_rows(tensor, 0, n_rows, out, kind, as_stored=True)
    return out


@pytest.mark.parametrize("kind", STORED_KINDS)
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 6, 7, 9, 13])
def test_a_linear_layer(kind: str, n_tokens: int) -> None:
    tensor = weights(kind, 160, 512)
    x = np.random.default_rng(n_tokens).standard_normal((n_tokens, 512)).astype(np.float32)
    x[0, 64:96] = 0  # a block of zeros has scale 0
    rows, w = quantised(x), packed(tensor)
    y = np.full((n_tokens, 160), 7, np.float32)
    kernels = kernels_of(STORED_KINDS[kind])
    args = (kernels, address(w), 16, 0, 5, rows.row(0), rows.stride, n_tokens, address(y), 160 * 4)
    linear(*args, 0)
    expected = definition.linear(x, *blocks.parts(kind, tensor.data))
    assert same_bits(y, expected)
    linear(*args, 1)
    assert same_bits(y, expected + expected)


@pytest.mark.parametrize("fill", [0x00, 0x80, 0xFF])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", STORED_KINDS)
def test_extreme_integers_stay_exact(kind: str, sign: int, fill: int) -> None:
    """Every weight the largest or the smallest of its kind, every activation as large as they come."""
    rows = blocks.filled_rows(kind, 32, 256, fill)
    x = np.full((5, 256), 127 * sign, np.float32)
    y, activations, w = np.empty((5, 32), np.float32), quantised(x), packed(StoredRows((32, 256), kind, rows))
    kernels = kernels_of(STORED_KINDS[kind])
    linear(kernels, address(w), 8, 0, 1, activations.row(0), activations.stride, 5, address(y), 128, 0)
    assert same_bits(y, definition.linear(x, *blocks.parts(kind, rows)))


@pytest.mark.parametrize("kind", STORED_KINDS)
def test_packed_weights_are_what_the_format_s_library_reads(kind: str) -> None:
    """Element for element and to the bit: nothing is lost. An embedding row is read so."""
    tensor = weights(kind, 96, 512)
    w, y = packed(tensor), np.empty((96, 512), np.float32)
    for row in range(96):
        unpack_row(kernels_of(STORED_KINDS[kind]), address(w), 16, row, address(y[row]))
    expected = blocks.elements(kind, tensor.data)
    # q4_0's m is -8 * d: element 8 is d * 8 + m, a zero of the other sign where d is negative
    assert same_bits(y + np.float32(0), expected + np.float32(0))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15])
def test_norm_and_quantisation(scale: float) -> None:
    random = np.random.default_rng(3)
    x = (random.standard_normal((1, 576)) * scale).astype(np.float32)
    weight = random.standard_normal(576).astype(np.float32)
    rows = ActivationRows(1, 576)
    run_norm(address(x), address(weight), 18, np.float32(1e-5), rows.row(0))
    rows.hold(definition.rms_norm(x, weight, 1e-5))


def test_a_row_of_zeros_quantises_to_zeros() -> None:
    x, rows = np.zeros((1, 64), np.float32), ActivationRows(1, 64)
    run_norm(address(x), address(x), 2, np.float32(1e-5), rows.row(0))
    assert not rows.values.any()
    assert not rows.scales.any()


def test_the_gate() -> None:
    random = np.random.default_rng(4)
    gate = (random.standard_normal((1, 32)) * 40).astype(np.float32)
    gate[0, :4] = [-200.0, 200.0, 0.0, -0.0]
    up = random.standard_normal((1, 32)).astype(np.float32)
    rows = ActivationRows(1, 32)
    run_gated(address(gate), address(up), rows.row(0), 1, 0)
    rows.hold(definition.silu(gate) * up)


def test_rope() -> None:
    random = np.random.default_rng(5)
    x = random.standard_normal(64).astype(np.float32)
    table = random.standard_normal((2, 32)).astype(np.float32)
    out = np.empty_like(x)
    run_rope(address(x), address(table), 32, np.float32(0.3), address(out))
    assert same_bits(out, definition.rope(x, table[0], table[1], 0.3))


class SoftmaxRows:
    """Some rows' state, with the room behind it that the kernel asks for."""

    def __init__(self, n_rows: int, maximum: float) -> None:
        self.n_rows = n_rows
        self.maxima = np.full(n_rows + RESCALE_LANES, maximum, np.float32)
        self.rescales = np.full(n_rows + RESCALE_LANES, np.nan, np.float32)
        self.sums = np.random.default_rng(n_rows).random((n_rows, 32)).astype(np.float32)

    def step(self, n_heads: int, n_valid: int, scores: NDArray) -> None:
        arrays = (scores, self.maxima, self.rescales, self.sums)
        softmax_step(np.int64(self.n_rows), np.int64(n_heads), np.int64(n_valid), *(address(a) for a in arrays))


@pytest.mark.parametrize("n_valid", [1, 5, 30, 31, 32])
@pytest.mark.parametrize(("n_tokens", "n_heads"), [(1, 1), (3, 2), (8, 3)])
def test_the_softmax_step(n_valid: int, n_tokens: int, n_heads: int) -> None:
    rows, random = SoftmaxRows(n_tokens * n_heads, 0.25), np.random.default_rng(n_valid)
    scores = (random.standard_normal((rows.n_rows, 32)) * 5).astype(np.float32)
    seen = [min(32, n_valid + row // n_heads) for row in range(rows.n_rows)]
    before, old_sums = scores.copy(), rows.sums.copy()
    for row, n in enumerate(seen):
        scores[row, n:] = np.nan  # stale rows
    rows.step(n_heads, n_valid, scores)
    for row, n in enumerate(seen):
        new = max(np.float32(0.25), before[row, :n].max())
        rescale = definition.exp(np.array([np.float32(0.25) - new], np.float32))
        expected = np.zeros(32, np.float32)
        expected[:n] = definition.exp(before[row, :n] - new)
        assert same_bits(scores[row], expected)
        assert (rows.maxima[row], rows.rescales[row]) == (new, rescale[0])
        assert same_bits(rows.sums[row], definition.fma(old_sums[row], rescale, expected))


def test_a_maximum_that_does_not_rise_rescales_by_exactly_one() -> None:
    assert definition.exp(np.zeros(1, np.float32))[0] == 1
    rows = SoftmaxRows(1, 1.0)
    rows.step(1, 32, np.zeros((1, 32), np.float32))
    assert (rows.maxima[0], rows.rescales[0]) == (1, 1)


def test_exp_is_accurate() -> None:
    x = np.linspace(-80, 80, 20_001).astype(np.float32)
    truth = np.exp(x.astype(np.float64))
    assert np.max(np.abs(definition.exp(x) - truth) / truth) < 1.5e-7


def test_the_definitions_fma_rounds_once() -> None:
    a, b = np.float32(1 + 2**-12), np.float32(1 + 2**-12)
    exact = 1 + 2**-11 + 2**-24
    assert definition.fma(a, b, np.float32(2**-80)) == np.float32(np.nextafter(np.float64(exact), 2))
    assert definition.fma(a, b, np.float32(-(2**-80))) == np.float32(np.nextafter(np.float64(exact), 0))


def test_a_norm_that_stays_float_and_a_dot_product() -> None:
    random = np.random.default_rng(6)
    x, weight = (random.standard_normal(96).astype(np.float32) for _ in range(2))
    out = np.empty_like(x)
    run_float_norm(address(x), address(weight), 3, np.float32(1e-6), address(out))
    assert same_bits(out, definition.rms_norm(x, weight, 1e-6))
    assert run_dot(address(x), address(weight), 3) == definition.dot(x, weight)


@pytest.mark.parametrize("normalise", [0, 1])
def test_a_router_takes_the_first_of_equals(normalise: int) -> None:
    random = np.random.default_rng(7)
    x, router = random.standard_normal(64).astype(np.float32), random.standard_normal((9, 64)).astype(np.float32)
    router[7] = router[2] = x / 8  # two equal ones, both among the best
    scratch, ids, weights = np.empty(9, np.float32), np.empty(4, np.int32), np.empty(4, np.float32)
    route(address(x), address(router), 2, 9, 4, normalise, address(scratch), address(ids), address(weights))
    expected_ids, expected = definition.route(x, router, 4, normalise=bool(normalise))
    assert ids.tolist() == expected_ids.tolist()
    assert ids.tolist()[:2] == [2, 7]
    assert same_bits(weights, expected)
