from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.node.refusals import refused_prefixes
from kvferry.store.vlkv import file_name, fnv1a


@given(tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), data=st.data())
def test_a_refused_snapshot_is_told_when_it_bears_the_name_of_a_prefix(tokens: list[int], data: st.DataObject) -> None:
    n_tokens = data.draw(st.integers(1, len(tokens)))
    ids = np.array(tokens, dtype=np.int32)
    name = file_name(fnv1a(ids[:n_tokens]))
    other = file_name(fnv1a(np.array([*tokens, 1], dtype=np.int32)))
    refused = {name: "size_mismatch", other: "bad_magic"}
    assert f"{name}: size_mismatch" in refused_prefixes(ids, refused)
    assert not any(other in entry for entry in refused_prefixes(ids, refused))


def test_without_refused_snapshots_nothing_is_told() -> None:
    assert refused_prefixes(np.arange(9000, dtype=np.int32), {}) == []
