"""A node whose kernels compute other bits than everybody else's does not serve."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.engine import selftest
from kvferry.engine.errors import SelfTestFailed
from kvferry.engine.kv_cache import KvKind
from kvferry.node import loading
from kvferry.node.config import NodeConfig


def test_wrong_bits_end_the_start(monkeypatch, tmp_path):
    monkeypatch.setitem(selftest.GOLDEN, KvKind.Q8, "0" * 64)
    monkeypatch.setattr(loading, "resolve_model", lambda _: tmp_path)
    monkeypatch.setattr(loading.TextModel, "load", lambda _: SimpleNamespace(digest=""))
    monkeypatch.setattr(loading.Engine, "load", lambda *_, **__: SimpleNamespace(weights="memory"))
    with pytest.raises(SelfTestFailed, match="cannot share conversations"):
        loading.load_serving(NodeConfig(model="m", threads=1), None, "boot", "version", lambda: None)
