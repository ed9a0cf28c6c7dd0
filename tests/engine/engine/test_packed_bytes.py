"""The bytes that packing makes are known: whoever changes them raises the version of the packed file as well."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest

from kvferry.engine import packed_file, selftest
from kvferry.engine.files.tensors import StoredRows
from kvferry.engine.kernels.linear import GROUP_ROWS
from kvferry.engine.packing import Quant, pack_model

# By rows of a group, for packed_file.VERSION 1. Another digest is another version.
KNOWN = {
    (8, "stored"): "8362742ab1124b89dd3b6f2e385f261b",
    (16, "stored"): "bc6e60f69e35972832059a3de3e7aa48",
    (8, "q8"): "db53f270fa391f673eff4e3f8aeb6bd8",
    (16, "q8"): "4cafe0578f34e8b018cb0fffbca38934",
    (8, "q4"): "0646adf8b05c89f9673a02717573daba",
    (16, "q4"): "a3d6a1b72666f55b04da876314d4082e",
}


def digest(quant: Quant, *, as_floats: bool) -> str:
    file = selftest.made_model()
    if as_floats:
        tensors = {name: _floats(tensor.read()) for name, tensor in file.tensors.items()}
        file = dataclasses.replace(file, tensors=tensors)
    return hashlib.sha256(pack_model(file, 32, quant).region.tobytes()).hexdigest()[:32]


def _floats(rows: np.ndarray) -> StoredRows:
    return StoredRows(rows.shape, "f32", np.ascontiguousarray(rows).view(np.uint8))


@pytest.mark.parametrize("how", ["stored", "q8", "q4"])
def test_packed_bytes_change_with_the_version_of_the_file_only(how: str) -> None:
    found = digest("q4" if how == "q4" else "q8", as_floats=how != "stored")
    assert packed_file.VERSION == 1
    assert found == KNOWN[GROUP_ROWS, how]
