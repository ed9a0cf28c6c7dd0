"""Builds an AArch64 userland to run kvferry in under qemu-user: `python tests/arm64/make_root.py [FOLDER]`.

What is put into it is what boards get: the bundle for AArch64, installed by the emulated Python as ansible does it. It
needs no chroot, no binfmt registration and no change to this system's package state: the packages are unpacked, not
installed, and qemu finds the libraries by its own prefix. Debian or Ubuntu with apt-get; the emulator itself
(qemu-user-static) is installed when it is missing, which takes root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

from kvferry.fleet.bundle import Bundle, make_bundle

PROJECT: Final = Path(__file__).parents[2]

EMULATOR: Final = "qemu-aarch64-static"
SYSTEM_PACKAGES: Final = ("python3.11", "libstdc++6", "libgomp1")
# The board that is stood in for: four Cortex-A55 and four Cortex-A76, as Linux shows them. LLVM reads the processor's
# name from here, and qemu would show the host's file.
_FEATURES: Final = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
_PARTS: Final = (("0xd05", "0x2"),) * 4 + (("0xd0b", "0x4"),) * 4


def default_root() -> Path:
    """Where the userland lies: in the user's cache, never in the project."""
    return user_cache_path("kvferry") / "tests" / "arm64"


def interpreter(root: Path) -> list[str]:
    """The command that starts the emulated CPython 3.11."""
    return [EMULATOR, "-cpu", "cortex-a76", "-L", str(root), str(root / "usr/bin/python3.11")]


def site_packages(root: Path) -> Path:
    return root / "opt/site"


def why_not(root: Path) -> str | None:
    """Why nothing can be emulated here; None when all is there."""
    if shutil.which(EMULATOR) is None:
        return f"{EMULATOR} is not installed; run {Path(__file__).name}, or install qemu-user-static"
    if not (root / "complete").is_file():
        return f"there is no AArch64 userland in {root}; run tests/arm64/{Path(__file__).name}"
    return None


def make_root(root: Path) -> None:
    """Build it beside its place and move it there when it is complete."""
    if shutil.which(EMULATOR) is None:
        wait = ["-o", "DPkg::Lock::Timeout=300"]  # for another apt-get to end
        install = ["install", "-y", "-q", "--no-install-recommends", "qemu-user-static"]
        subprocess.run(["apt-get", *wait, *install], check=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    bundle = make_bundle(PROJECT, root.parent / "bundles", "aarch64", "3.11")
    with tempfile.TemporaryDirectory(prefix="arm64-", dir=root.parent) as folder:
        staged = Path(folder) / "root"
        staged.mkdir()
        _unpack_system(staged, Path(folder) / "apt")
        (staged / "proc").mkdir(exist_ok=True)
        (staged / "proc/cpuinfo").write_text("".join(_processor(i) for i in range(len(_PARTS))))
        install_bundle(staged, bundle, site_packages(staged))
        (staged / "complete").touch()
        shutil.rmtree(root, ignore_errors=True)
        staged.rename(root)


def _unpack_system(root: Path, state: Path) -> None:
    """Download the packages with apt, under a state folder of its own, and unpack them."""
    for part in ("lists/partial", "archives/partial"):
        (state / part).mkdir(parents=True)
    (state / "status").touch()
    settings = {
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache::archives": state / "archives",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "APT::Keep-Downloaded-Packages": "true",
        "Binary::apt::APT::Keep-Downloaded-Packages": "true",
    }
    apt = ["apt-get", "-q", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    subprocess.run([*apt, "update"], check=True)
    only = ["-y", "--no-install-recommends", "--download-only", "install"]
    subprocess.run([*apt, *only, *SYSTEM_PACKAGES], check=True)
    for package in sorted((state / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)


def install_bundle(root: Path, bundle: Bundle, target: Path) -> None:
    """Unpack the bundle, compare the sums, and have the emulated pip install from nothing else."""
    with tempfile.TemporaryDirectory(prefix="bundle-") as folder:
        with tarfile.open(bundle.tar) as archive:
            archive.extractall(folder, filter="data")
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
        (pip,) = Path(folder).glob("pip-*.whl")
        offline = ["--no-index", f"--find-links={folder}", "--no-cache-dir", "--no-compile", "--quiet"]
        quiet = ["--disable-pip-version-check", "--root-user-action=ignore"]
        wanted = ["--target", str(target), f"kvferry=={bundle.version}"]
        subprocess.run([*interpreter(root), str(pip / "pip"), "install", *offline, *quiet, *wanted], check=True)


def _processor(index: int) -> str:
    part, variant = _PARTS[index]
    facts = {
        "processor": index,
        "BogoMIPS": "48.00",
        "Features": _FEATURES,
        "CPU implementer": "0x41",
        "CPU architecture": 8,
        "CPU variant": variant,
        "CPU part": part,
        "CPU revision": 0,
    }
    return "".join(f"{name}\t: {value}\n" for name, value in facts.items()) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else default_root()
    make_root(target)
    subprocess.run(
        [*interpreter(target), "-c", "import platform; print('this is', platform.machine())"],
        env=os.environ | {"PYTHONPATH": str(site_packages(target))},
        check=True,
    )
