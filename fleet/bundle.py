#!/usr/bin/env python3
"""Gathers all that a board needs to install kvferry without a network: one tar of wheels with their SHA-256 sums.

Runs on the controller, needs pip and a package index, and only the standard library: the playbooks call it as a program
with ansible's Python, people by `kvferry fleet bundle`. Prints JSON: {"release", "version", "tar", "sha256", "made"}. A
bundle that is there already is not made again, and one that needs the same as an earlier one takes its wheels: releases
then differ in our code alone, and the index is not asked. pip compares each wheel with the sum that the index gives.

A release is named by its version and a digest of its sources, so two states of the tree never share a name.
pip evaluates environment markers for the interpreter it runs under, not for the target: none of our dependencies has
one that differs between x86-64 and aarch64 Linux of the same Python.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from email import message_from_bytes
from pathlib import Path

ARCHITECTURES = ("x86_64", "aarch64")

# The oldest C library that llvmlite's wheels run on; a bundle for it installs on every newer board.
GLIBC_MINOR = 28
# Zip and tar files made of the same sources are the same bytes: 2020-01-01, any fixed time after 1980 will do.
SOURCE_DATE_EPOCH = "1577836800"
SKIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "*.egg-info")


class CannotBundle(Exception):
    """There is no bundle; the sentence says why and what to do."""

    code = "cannot_bundle"
    exit_code = 1


@dataclass(frozen=True)
class Bundle:
    """One release for one kind of board. ``made``: now, it was not there already."""

    release: str
    version: str
    tar: str
    sha256: str
    made: bool


def make_bundle(
    source: Path, output: Path, arch: str, python: str, extras: Sequence[str] = (), *, refresh: bool = False
) -> Bundle:
    """Gather the release of the tree ``source`` into the folder ``output``.

    Args:
        refresh: make it again with the newest dependencies that the index has.

    Raises:
        CannotBundle: the tree is none of kvferry, it has no such extra, or pip could not bring everything.
    """
    if not (source / "pyproject.toml").is_file() or not (source / "src" / "kvferry").is_dir():
        raise CannotBundle(f"{source} is no source tree of kvferry: name one with --source")
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    known = sorted(project.get("optional-dependencies", {}))
    if unknown := sorted(set(extras) - set(known)):  # pip would only warn, and boards would be without it
        raise CannotBundle(f"kvferry has no extra {', '.join(unknown)}: there are {', '.join(known)}")
    version = project["version"]
    with tempfile.TemporaryDirectory(prefix="kvferry-bundle-") as temp:
        tree = Path(temp, "tree")
        _copy_sources(source, tree)
        release = f"{version}-{_digest_of_tree(tree)[:8]}"
        marks = [arch, f"py{python.replace('.', '')}", *sorted(extras)]
        tar = output / f"kvferry-{release}-{'-'.join(marks)}.tar"
        made = refresh or not tar.exists()
        if made:
            wheels = Path(temp, "wheels")
            ours = _build(tree, wheels)
            if refresh or not _take_dependencies(ours, output.glob(f"kvferry-*-{'-'.join(marks)}.tar")):
                _download_dependencies(ours, arch, python, extras)
            output.mkdir(parents=True, exist_ok=True)
            _write_tar(wheels, tar)
    return Bundle(release, version, str(tar), _sha256(tar), made)


def main() -> None:
    arguments = _arguments()
    try:
        extras = [extra.strip() for extra in arguments.extras.split(",") if extra.strip()]
        bundle = make_bundle(
            arguments.source, arguments.output, arguments.arch, arguments.python, extras, refresh=arguments.refresh
        )
    except CannotBundle as error:
        sys.exit(f"error: {error}")
    print(json.dumps(asdict(bundle)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", required=True, choices=ARCHITECTURES, help="the boards' architecture")
    parser.add_argument("--python", required=True, help="the boards' Python, such as 3.11")
    parser.add_argument("--output", required=True, type=Path, help="folder that keeps bundles")
    parser.add_argument("--extras", default="", help="such as s3,tracing")
    parser.add_argument("--refresh", action="store_true", help="make it again with the newest dependencies")
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parent.parent, help="tree of kvferry")
    return parser.parse_args()


def _copy_sources(source: Path, tree: Path) -> None:
    """What the wheel is made of, so that building leaves nothing in the tree and nothing else gets into the digest."""
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(source / name, tree / name)
    for room in sorted((source / "src" / "kvferry").iterdir()):
        target = tree / "src" / "kvferry" / room.name
        if room.is_dir() and room.name != "__pycache__":
            shutil.copytree(room.resolve(), target, ignore=SKIPPED)
        elif room.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(room, target)


def _digest_of_tree(tree: Path) -> str:
    digest = hashlib.sha256()
    for path in _files(tree):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(tree)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _build(tree: Path, wheels: Path) -> Path:
    """Our wheel, alone in the folder."""
    _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(tree))
    return next(wheels.glob("kvferry-*.whl"))


def _download_dependencies(ours: Path, arch: str, python: str, extras: Sequence[str]) -> None:
    """What our wheel needs on the target, and pip itself, beside it: Debian's python3 comes without one."""
    platforms = [f"manylinux_2_{minor}_{arch}" for minor in range(GLIBC_MINOR, 4, -1)]
    _pip(
        "download", "--dest", str(ours.parent), "--only-binary=:all:", "--implementation=cp",
        f"--python-version={python}",
        *(f"--platform={platform}" for platform in [*platforms, f"manylinux2014_{arch}"]),
        f"{ours}[{','.join(extras)}]" if extras else str(ours), "pip",
    )  # fmt: skip


def _take_dependencies(ours: Path, earlier: Iterable[Path]) -> bool:
    """Whether an earlier bundle was of a wheel with the same needs: the newest one's wheels lie beside ours then."""
    for tar in sorted(earlier, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            wheels = _read_tar(tar)
            theirs = next(name for name in wheels if name.startswith("kvferry-"))
            is_same = _needs(io.BytesIO(wheels.pop(theirs))) == _needs(ours)
        except (OSError, KeyError, StopIteration, ValueError, tarfile.TarError, zipfile.BadZipFile):
            continue  # damaged: it is no help
        if is_same:
            for name, content in wheels.items():
                (ours.parent / name).write_bytes(content)
            return True
    return False


def _needs(wheel: Path | io.BytesIO) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return sorted(message_from_bytes(archive.read(name)).get_all("Requires-Dist") or [])


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        env={**os.environ, "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CannotBundle(f"pip {arguments[0]} failed, so there is no bundle:\n{done.stderr.strip()}")


def _write_tar(wheels: Path, tar: Path) -> None:
    """Appears whole or not at all. Holds the wheels and SHA256SUMS, as `sha256sum --check` reads it."""
    names = sorted(path.name for path in wheels.glob("*.whl"))
    sums = "".join(f"{_sha256(wheels / name)}  {name}\n" for name in names).encode()
    temp = tar.with_name(f"{tar.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(temp, "w") as archive:
            _add(archive, "SHA256SUMS", sums)
            for name in names:
                _add(archive, name, (wheels / name).read_bytes())
        temp.replace(tar)
    finally:
        temp.unlink(missing_ok=True)


def _read_tar(tar: Path) -> dict[str, bytes]:
    """Name → content of the wheels. ValueError: one is not what its sum says."""
    wheels = {}
    with tarfile.open(tar) as archive:
        for line in _member(archive, "SHA256SUMS").decode().splitlines():
            digest, name = line.split(maxsplit=1)
            wheels[name] = _member(archive, name)
            if hashlib.sha256(wheels[name]).hexdigest() != digest:
                raise ValueError(name)
    return wheels


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise ValueError(name)
    return file.read()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(content), 0o644, int(SOURCE_DATE_EPOCH)
    archive.addfile(entry, io.BytesIO(content))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
