"""Two pictures have the same tokens; rows behind them are shared only where the content is the same."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.store import catalog, chains
from kvferry.store.errors import StoreMisuse
from kvferry.store.vlkv3 import ContentSpan

from .test_segments import rows_for, store_at

PLACEHOLDER = 999
TEXT = st.lists(st.sampled_from([1, 2, PLACEHOLDER]), min_size=1, max_size=4)
PICTURE = st.tuples(st.integers(1, 3), st.sampled_from([b"a", b"b"]))
SEQUENCES = st.lists(st.one_of(TEXT, PICTURE), min_size=1, max_size=5)


def laid_out(parts) -> tuple[np.ndarray, list[ContentSpan], list[object]]:
    """Ids, spans, and what really stands at each place."""
    ids, spans, content = [], [], []
    for part in parts:
        if isinstance(part, list):
            ids += part
            content += part
            continue
        n, name = part
        spans.append(ContentSpan(len(ids), n, name * 32))
        ids += [PLACEHOLDER] * n
        content += [(n, name, i) for i in range(n)]
    return np.array(ids, np.int32), spans, content


def n_same(left: list[object], right: list[object]) -> int:
    pairs = list(zip(left, right, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def one_word_for_all_pictures(ids, start, spans):
    """As if all pictures had collided in the index."""
    out = np.array(ids, np.int32)
    for span in spans:
        out[max(span.start - start, 0) : max(span.start + span.length - start, 0)] = -1
    return out


@settings(deadline=None, max_examples=150)
@example(saved=[[(1, b"b"), (1, b"a")], [(2, b"b")]], asked=[(1, b"b")], collide=False)
@given(saved=st.lists(SEQUENCES, min_size=1, max_size=4), asked=SEQUENCES, collide=st.booleans())
def test_a_request_finds_what_was_computed_from_the_same_content(saved, asked, collide) -> None:
    """And never more, not even when the index cannot tell pictures apart."""
    ids, spans, content = laid_out(asked)
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        if collide:
            patch.setattr(catalog, "identity_ids", one_word_for_all_pictures)
            patch.setattr(chains, "identity_ids", one_word_for_all_pictures)
        store = store_at(Path(root))
        contents = {}
        for parts in saved:
            other_ids, other_spans, other_content = laid_out(parts)
            name = store.publish(other_ids, rows_for(other_ids), spans=other_spans).name
            if len(other_content) >= len(contents.get(name, [])):  # else the longer one was there already
                contents[name] = other_content
        longest = max(n_same(c, content) for c in contents.values())
        for reader in (store, store_at(Path(root), "node-2")):
            match = reader.find(ids, 1, spans)
            n_found = 0 if match is None else match.n_common
            assert n_found <= longest
            assert collide or n_found == longest


def test_rows_come_back_up_to_the_middle_of_a_picture(tmp_path) -> None:
    ids, spans, _ = laid_out([[1] * 20, (40, b"c"), [2] * 10])
    store_at(tmp_path).publish(ids[:33], rows_for(ids), spans=spans)
    store = store_at(tmp_path, "node-2")
    assert store.find(ids, spans=spans).n_common == 33
    assert store.publish(ids, rows_for(ids), spans=spans).start == 33
    again = store_at(tmp_path, "node-3")
    assert again.find(ids, spans=spans).n_common == 70
    assert again.find(ids, spans=[ContentSpan(20, 40, b"d" * 32)]).n_common == 20


def test_version_1_cannot_say_what_a_picture_shows(tmp_path) -> None:
    """It is not written across one, and not read across one's placeholders, whoever wrote them."""
    ids, spans, _ = laid_out([[1] * 20, (40, b"c"), [2] * 10])
    old = store_at(tmp_path, version=1)
    with pytest.raises(StoreMisuse, match="what a picture shows"):
        old.publish(ids, rows_for(ids), spans=spans)
    assert old.publish(ids[:20], rows_for(ids), spans=spans).n_tokens == 20
    old.publish(ids, rows_for(ids))  # a program that knows of no pictures
    store = store_at(tmp_path, "node-2", placeholder_ids=[PLACEHOLDER])
    assert store.find(ids, spans=spans).n_common == 20
    assert store.find(ids).n_common == 20
