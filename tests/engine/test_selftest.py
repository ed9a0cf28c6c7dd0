"""The golden bits, and what `kvferry doctor` says of this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvferry.doctor import Finding, Subject, Verdict
from kvferry.engine import doctor_checks, selftest
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


MACHINE = Subject()


def findings(subject: Subject = MACHINE) -> dict[str, Finding]:
    return {finding.check: finding for finding in doctor_checks.engine(subject)}


def test_doctor_names_the_path_and_the_bits():
    found = findings()
    assert ISA.name in found["kernel path"].found
    assert "as they should be" in found["golden bits, 2 threads"].found
    assert all(finding.verdict is not Verdict.FAIL for finding in found.values())


def test_doctor_fails_where_the_bits_are_wrong(monkeypatch):
    monkeypatch.setitem(selftest.GOLDEN, KvKind.F16, "0" * 64)
    finding = findings()["golden bits, 1 thread"]
    assert finding.verdict is Verdict.FAIL
    assert "computes other bits" in finding.found
    assert finding.advice


def test_doctor_says_whether_a_model_fits_and_is_what_was_fetched(smollm2_path, monkeypatch):
    quick = findings(Subject(model=str(smollm2_path), quick=True))
    assert quick["memory"].verdict is Verdict.OK
    assert "golden bits, 1 thread" not in quick
    assert findings(Subject(model="no-such-model", quick=True))["model"].verdict is Verdict.FAIL
    much = findings(Subject(model=str(smollm2_path), kv_bytes=1 << 50, quick=True))["memory"]
    assert much.verdict is Verdict.WARN
    assert "--kv-memory" in much.advice


def test_doctor_sees_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_checks, "cache_root", lambda: tmp_path / "not" / "there")
    assert findings(Subject(quick=True))["cache"].verdict is Verdict.OK
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert findings(Subject(quick=True))["cache"].verdict is Verdict.WARN
