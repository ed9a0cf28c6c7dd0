"""The golden bits, and what `kvferry doctor` says of this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvferry.engine import selftest
from kvferry.engine.commands import doctor
from kvferry.engine.errors import SelfTestFailed
from kvferry.engine.kernels.instruction_sets import KERNEL_PATH_VARIABLE
from kvferry.engine.kernels.intrinsics import ISA
from kvferry.engine.kv_cache import KvKind


@pytest.mark.parametrize("n_threads", [1, 2])
def test_this_machine_computes_the_golden_bits(n_threads):
    selftest.self_test(n_threads)


def test_the_generic_path_computes_them_too():
    """The golden bits are one set for all processors; the generic path is nobody's own instructions."""
    code = "from kvferry.engine.selftest import self_test; self_test()"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {KERNEL_PATH_VARIABLE: "generic"}, check=True)


@pytest.mark.parametrize("kind", list(KvKind))
def test_another_bit_in_any_kind_is_refused(monkeypatch, kind):
    monkeypatch.setitem(selftest.GOLDEN, kind, "0" * 64)
    with pytest.raises(SelfTestFailed, match=f"{kind} rows.*KVFERRY_KERNEL_PATH=generic"):
        selftest.self_test()


def test_doctor_names_the_path_and_the_bits():
    result = CliRunner().invoke(doctor.doctor)
    assert result.exit_code == 0
    assert ISA.name in result.output
    assert "as they should be" in result.output


def test_doctor_fails_where_the_bits_are_wrong(monkeypatch):
    monkeypatch.setitem(selftest.GOLDEN, KvKind.F16, "0" * 64)
    result = CliRunner().invoke(doctor.doctor)
    assert result.exit_code == 1
    assert "computes other bits" in " ".join(result.output.split())
