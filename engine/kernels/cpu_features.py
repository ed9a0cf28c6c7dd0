"""What this processor can do, from the one who knows: LLVM on x86, the operating system on AArch64.

LLVM derives an AArch64 processor's features from its name, and an unknown name says nothing about dot products. The
kernel's HWCAP does, and holds for all cores of a big.LITTLE pair.
"""

from __future__ import annotations

import platform
import struct
from pathlib import Path
from typing import Any, Final

_AUXILIARY_VECTOR: Final = Path("/proc/self/auxv")
_AT_HWCAP: Final = 16
_AT_HWCAP2: Final = 26
# LLVM's name of a feature: which word of the auxiliary vector has its bit, and which bit that is.
_ARM_BITS: Final = {
    "dotprod": (_AT_HWCAP, 20),  # HWCAP_ASIMDDP
    "i8mm": (_AT_HWCAP2, 13),  # HWCAP2_I8MM
}
ARM_MACHINES: Final = frozenset({"aarch64", "arm64"})


def arm_features(auxiliary_vector: bytes) -> set[str]:
    """Which of dotprod and i8mm the kernel vouches for, from /proc/self/auxv (pairs of native longs)."""
    pairs = struct.iter_unpack("@LL", auxiliary_vector[: len(auxiliary_vector) // 16 * 16])
    words = dict(pairs)
    return {name for name, (word, bit) in _ARM_BITS.items() if words.get(word, 0) >> bit & 1}


def host_features() -> set[str]:
    """LLVM's names of what this machine has. On AArch64 dotprod and i8mm are there only if the kernel says so."""
    from llvmlite import binding

    found = {name for name, present in binding.get_host_cpu_features().items() if present}
    if platform.machine() in ARM_MACHINES:
        found = (found - set(_ARM_BITS)) | _arm_features_here()
    return found


def tell_compiler() -> None:
    """Have numba compile for exactly the AArch64 features that the kernel vouches for.

    Without it a dot instruction on a processor that LLVM does not know ends the process. What NUMBA_CPU_FEATURES says
    is left alone. Call it before the first compilation.
    """
    if platform.machine() not in ARM_MACHINES:
        return
    import numba
    from llvmlite import binding

    config: Any = numba.config
    if config.CPU_FEATURES is None:
        here = _arm_features_here()
        stated = [f"{'+' if name in here else '-'}{name}" for name in sorted(_ARM_BITS)]
        config.CPU_FEATURES = ",".join(filter(None, [binding.get_host_cpu_features().flatten(), *stated]))


def _arm_features_here() -> set[str]:
    try:
        return arm_features(_AUXILIARY_VECTOR.read_bytes())
    except OSError:  # no /proc: nobody vouches for anything
        return set()
