"""The engine on small random models: equal to the definition of its arithmetic, and orderly when asked for too much."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.engine.engine import Chunk
from kvferry.engine.errors import ContextExceeded, InvalidTokens, OutOfKvMemory
from kvferry.engine.reference import ReferenceModel

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parent / "tiny_models.py")
tiny = importlib.util.module_from_spec(spec)
sys.modules["tiny_models"] = tiny
spec.loader.exec_module(tiny)

SMALL = tiny.SHAPES["small heads, untied"]


def rows_of(engine, sequence):
    g = engine.geometry
    k = np.empty((g.n_layers, sequence.n_rows, g.kv_dim), np.float32)
    v = np.empty_like(k)
    for layer in range(g.n_layers):
        sequence.read_rows(layer, 0, sequence.n_rows, k[layer], v[layer])
    return k, v


@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
@pytest.mark.parametrize("name", tiny.SHAPES)
def test_a_whole_model_is_what_the_definition_says(name, kv, model_file, make_engine, tokens):
    file = tiny.write_model(model_file, tiny.SHAPES[name])
    ids = tokens(75)
    logits, k, v = tiny.defined_forward(file, ids, kv)
    for n_threads in (1, 2):
        engine = make_engine(file, n_threads=n_threads, kv=kv)
        sequence = engine.new_sequence()
        parts = [engine.forward([Chunk(sequence, part, "all")])[0] for part in np.split(ids, [40, 41, 44])]
        assert np.concatenate(parts).tobytes() == logits.tobytes()
        got_k, got_v = rows_of(engine, sequence)
        assert got_k.tobytes() == k.tobytes()
        assert got_v.tobytes() == v.tobytes()


@pytest.mark.parametrize("name", tiny.SHAPES)
def test_a_model_is_near_the_reference_on_the_numbers_that_its_file_holds(name, model_file, make_engine, tokens):
    """What is left is what activations of 8 bits cost."""
    file = tiny.write_model(model_file, tiny.SHAPES[name])
    engine, ids = make_engine(file), tokens(60)
    exact = ReferenceModel.load(file.path).forward(ids).logits
    found = engine.forward([Chunk(engine.new_sequence(), ids, "all")])[0]
    assert np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)) < 0.1


def test_logits_are_given_for_none_the_last_or_all_rows(model_file, make_engine, tokens):
    engine = make_engine(tiny.write_model(model_file, SMALL))
    a, b, c = (engine.new_sequence() for _ in range(3))
    none, last, every = engine.forward(
        [Chunk(a, tokens(5), "none"), Chunk(b, tokens(5), "last"), Chunk(c, tokens(5), "all")]
    )
    assert (none.shape, last.shape, every.shape) == ((0, 100), (1, 100), (5, 100))
    assert np.array_equal(last[0], every[4])


def test_steps_without_logits_beside_steps_with_them_never_hang(model_file, make_engine, tokens):
    """Thread 0 goes on to the next step at once; a thread that still looked at the last one's record would be lost."""
    engine = make_engine(tiny.write_model(model_file, SMALL), n_threads=3)
    for i in range(300):
        sequence = engine.new_sequence()
        engine.forward([Chunk(sequence, tokens(1 + i % 5), "none")])
        engine.forward([Chunk(sequence, tokens(1), "last")])
        sequence.release()


def test_a_batch_larger_than_a_pass_is_cut(model_file, make_engine, tokens):
    file = tiny.write_model(model_file, SMALL)
    whole, cut = make_engine(file), make_engine(file, max_batch_rows=7)
    a, b = whole.new_sequence(), cut.new_sequence()
    c, d = whole.new_sequence(), cut.new_sequence()
    first = whole.forward([Chunk(a, tokens(20), "all"), Chunk(c, tokens(9), "last")])
    second = cut.forward([Chunk(b, tokens(20), "all"), Chunk(d, tokens(9), "last")])
    assert all(np.array_equal(x, y) for x, y in zip(first, second, strict=True))


def test_too_much_is_refused_before_anything_changes(model_file, make_engine, tokens):
    file = tiny.write_model(model_file, SMALL)
    engine = make_engine(file, kv_bytes=3 * 2 * 2 * 64 * 32 * 4)  # three blocks
    assert engine.pool.n_blocks == 3
    sequence, other = engine.new_sequence(), engine.new_sequence()
    engine.forward([Chunk(sequence, tokens(33), "none")])
    with pytest.raises(OutOfKvMemory, match="release a sequence"):
        engine.forward([Chunk(sequence, tokens(31), "none"), Chunk(other, tokens(33), "none")])
    assert (sequence.n_rows, other.n_rows, engine.pool.n_free_blocks) == (33, 0, 1)
    with pytest.raises(ContextExceeded, match="512"):
        engine.forward([Chunk(other, tokens(513))])
    for bad in (np.empty(0, np.int32), np.array([100], np.int32), np.array([-1], np.int32)):
        with pytest.raises(InvalidTokens):
            engine.forward([Chunk(other, bad)])
    with pytest.raises(InvalidTokens, match="twice"):
        engine.forward([Chunk(other, tokens(1)), Chunk(other, tokens(1))])
    engine.forward([Chunk(other, tokens(32), "none")])
