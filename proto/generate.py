"""Generates the Python stubs from the .proto files; with --check only says whether they are up to date.

Usage: python -m kvferry.proto.generate [--check]     (needs the `dev` extra)
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path

FOLDERS = ("v1", "etcd")  # ours, and the part of etcd's that we call
IMPORT_ROOT = Path(
    __file__
).parent.parent.parent  # the folder that holds kvferry/, as imported (src/, a chain of symlinks)
IMPORT_PATHS = tuple(f"kvferry/proto/{folder}" for folder in FOLDERS)


def generate(output_root: Path) -> list[Path]:
    """Writes stubs and type stubs for every .proto file below output_root and returns their paths.

    Raises:
        RuntimeError: when protoc refuses a file (it has printed why).
    """
    from importlib import resources

    from grpc_tools import protoc

    sources = sorted(f"{path}/{file.name}" for path in IMPORT_PATHS for file in (IMPORT_ROOT / path).glob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    outputs = [f"--{kind}_out={output_root}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    scripts = Path(sysconfig.get_path("scripts"))  # the venv need not be on PATH
    plugins = [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    status = protoc.main(["protoc", f"-I{IMPORT_ROOT}", f"-I{well_known}", *plugins, *outputs, *sources])
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")
    return sorted(file for path in IMPORT_PATHS for file in (output_root / path).glob("*_pb2*"))


def stale_stubs() -> list[str]:
    """Names of committed stubs that differ from what the .proto files give now."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = {path.name: path.read_bytes() for path in generate(Path(folder))}
    stubs = [file for path in IMPORT_PATHS for file in (IMPORT_ROOT / path).glob("*_pb2*")]
    committed = {path.name: path.read_bytes() for path in stubs if path.suffix in {".py", ".pyi"}}
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> int:
    """Command line entry; the exit status is 1 when --check finds a difference."""
    if "--check" in sys.argv[1:]:
        stale = stale_stubs()
        if stale:
            print(f"error: generated stubs are stale: {', '.join(stale)}; run `make proto`", file=sys.stderr)
        return 1 if stale else 0
    generate(IMPORT_ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
