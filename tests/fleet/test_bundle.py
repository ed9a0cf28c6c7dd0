"""`kvferry fleet bundle`: what boards install without a network, and that it runs on the boards' processor."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

import grpc
import pytest

from kvferry.drills.model import DEFAULT_MODEL, ensure_model
from kvferry.engine.files.digest import file_sha256
from kvferry.engine.files.fetch import verify_model
from kvferry.engine.files.resolve import resolve_model
from kvferry.fleet.bundle import Bundle, CannotBundle, make_bundle
from kvferry.fleet.cli import gather_model
from kvferry.proto.channel import channel_options
from kvferry.proto.v1 import common_pb2, worker_pb2, worker_pb2_grpc

PROJECT: Final = Path(__file__).parents[2]
KVFERRY: Final = ("-m", "kvferry.client.cli")
START_SECONDS: Final = 1800  # all kernels are compiled under emulation


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


arm64 = load(PROJECT / "tests/arm64/make_root.py")


def test_a_folder_that_is_no_source_tree_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(CannotBundle, match="is no source tree of kvferry: name one with --source"):
        make_bundle(tmp_path, tmp_path, "aarch64", "3.11")


def test_an_extra_that_there_is_not_is_refused_before_anything_is_gathered(tmp_path):
    """pip only warns of one, and boards would find out that they are without it."""
    with pytest.raises(CannotBundle, match=r"^kvferry has no extra tracin: there are .*s3.*tracing"):
        make_bundle(PROJECT, tmp_path / "bundles", "aarch64", "3.11", ["s3", "tracin"])
    assert not (tmp_path / "bundles").exists()


def test_a_model_that_was_not_fetched_is_refused(tmp_path):
    command = [sys.executable, *KVFERRY, "fleet", "bundle", "--model", "nobody/nothing", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: ")
    assert "nobody/nothing" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_model_of_an_earlier_bundle_is_replaced(tmp_path):
    ensure_model(DEFAULT_MODEL)
    record = verify_model(DEFAULT_MODEL)
    ((path, recorded),) = gather_model(record, tmp_path)
    path.unlink()  # a hard link: writing into it would damage the cache
    path.write_bytes(b"cut")
    assert gather_model(record, tmp_path) == [(path, recorded)]
    assert file_sha256(path) == recorded


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_bundle_holds_wheels_for_the_boards_and_verified_models(tmp_path):
    ensure_model(DEFAULT_MODEL)
    command = [sys.executable, *KVFERRY, "fleet", "bundle", "--arch", "aarch64", "--model", DEFAULT_MODEL]
    done = subprocess.run(
        [*command, "--output", str(tmp_path), "--json"], capture_output=True, text=True, timeout=600, check=True
    )
    told = json.loads(done.stdout)
    names = subprocess.run(["tar", "-tf", told["tar"]], capture_output=True, text=True, check=True).stdout.split()
    assert "SHA256SUMS" in names
    assert any(name.startswith("pip-") for name in names)
    assert not [name for name in names if "x86_64" in name]
    assert [name for name in names if name.startswith("numba-") and name.endswith("aarch64.whl")]
    (model,) = told["models"]
    assert Path(model["path"]).read_bytes() == resolve_model(DEFAULT_MODEL).read_bytes()


def tree(folder: Path, version: str, needs: str) -> Path:
    """A tree that is bundled in a second: the name and layout of kvferry, nothing in it."""
    (folder / "src/kvferry/room").mkdir(parents=True, exist_ok=True)
    (folder / "src/kvferry/room/__init__.py").write_text("")
    for name in ("README.md", "LICENSE"):
        (folder / name).write_text("")
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "kvferry"\nversion = "{version}"\ndependencies = [{needs}]\n'
    )
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For which versions the index was asked for dependencies; it has one for each, none of them a real wheel. Ours is
    one that was not built by pip, which would need the index too."""
    versions: list[str] = []

    def build(tree: Path, wheels: Path) -> Path:
        project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
        wheels.mkdir()
        wheel = wheels / f"kvferry-{project['version']}-py3-none-any.whl"
        needs = "".join(f"Requires-Dist: {need}\n" for need in project["dependencies"])
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"kvferry-{project['version']}.dist-info/METADATA", f"Name: kvferry\n{needs}\nReadme")
        return wheel

    def download(ours: Path, *_: object) -> None:
        versions.append(ours.name.split("-")[1])
        (ours.parent / f"dependency-{len(versions)}-py3-none-any.whl").write_bytes(b"wheel %d" % len(versions))

    monkeypatch.setattr("kvferry.fleet.bundle._build", build)
    monkeypatch.setattr("kvferry.fleet.bundle._download_dependencies", download)
    return versions


def dependencies_in(bundle: Bundle) -> list[str]:
    with tarfile.open(bundle.tar) as archive:
        return [name for name in archive.getnames() if name.startswith("dependency")]


def test_a_release_that_needs_the_same_takes_the_wheels_of_the_bundle_before(tmp_path, asked):
    """The index is a stand-in."""
    one = make_bundle(tree(tmp_path / "tree", "1", '"numpy>=2"'), tmp_path / "out", "x86_64", "3.11")
    two = make_bundle(tree(tmp_path / "tree", "2", '"numpy>=2"'), tmp_path / "out", "x86_64", "3.11")
    other = make_bundle(tree(tmp_path / "tree", "3", '"numpy>=3"'), tmp_path / "out", "x86_64", "3.11")
    other_board = make_bundle(tree(tmp_path / "tree", "4", '"numpy>=3"'), tmp_path / "out", "aarch64", "3.11")
    again = make_bundle(tmp_path / "tree", tmp_path / "out", "x86_64", "3.11", refresh=True)
    assert asked == ["1", "3", "4", "4"]
    assert [dependencies_in(made) for made in (one, two, other, other_board, again)] == [
        [f"dependency-{number}-py3-none-any.whl"] for number in (1, 1, 2, 3, 4)
    ]


def test_a_damaged_bundle_before_is_no_source_of_wheels(tmp_path, asked):
    """The index is a stand-in."""
    one = make_bundle(tree(tmp_path / "tree", "1", '"numpy>=2"'), tmp_path / "out", "x86_64", "3.11")
    whole = Path(one.tar).read_bytes()
    for number, damaged in enumerate((whole[:700], whole.replace(b"wheel 1", b"wheel 9"), b""), start=2):
        Path(one.tar).write_bytes(damaged)
        bundle = make_bundle(tree(tmp_path / "tree", str(number), '"numpy>=2"'), tmp_path / "out", "x86_64", "3.11")
        assert asked[-1] == str(number)
        Path(bundle.tar).unlink()


@contextmanager
def node(
    interpreter: Sequence[str], environment: dict[str, str], folder: Path, node_id: str
) -> Iterator[worker_pb2_grpc.WorkerServiceStub]:
    """A node of the real model, serving; its self-test on golden bits is behind it."""
    ready = folder / f"{node_id}.json"
    flags = ["--threads", "1", "--context", "256", "--kv-memory", "64MiB", "--listen", "127.0.0.1:0"]
    model = ["--model", str(resolve_model(DEFAULT_MODEL)), "--node-id", node_id, "--ready-file", str(ready)]
    process = subprocess.Popen([*interpreter, *KVFERRY, "node", "run", *model, *flags], env=environment)
    try:
        until = time.monotonic() + START_SECONDS
        while not ready.exists():
            assert process.poll() is None, "the node ended before it served"
            assert time.monotonic() < until, "the node does not serve in time"
            time.sleep(0.2)
        with grpc.insecure_channel(json.loads(ready.read_text())["address"], options=channel_options()) as channel:
            yield worker_pb2_grpc.WorkerServiceStub(channel)
    finally:
        process.kill()
        process.wait(10)


def answer(stub: worker_pb2_grpc.WorkerServiceStub) -> list[tuple[int, float]]:
    """Tokens drawn with a seed, with the bits of their log-probabilities."""
    request = worker_pb2.RunTurnRequest(
        session_id="s", turn_id="t", epoch=1, token_ids=range(100, 140), n_prompt_tokens=40, max_tokens=12,
        sampling=common_pb2.SamplingSettings(temperature=0.8, seed=7, logprobs=True),
    )  # fmt: skip
    return [
        (token.token_id, token.logprob)
        for response in stub.RunTurn(request, timeout=600)
        for token in response.tokens.tokens
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_node_from_the_bundle_passes_the_self_test_on_aarch64_and_answers_with_the_bits_of_x86(tmp_path):
    """What arm64/make_root.py installed is the bundle, by the emulated pip. The emulator is qemu's, not silicon."""
    ensure_model(DEFAULT_MODEL)
    root = arm64.default_root()
    missing = arm64.why_not(root)
    if missing:
        pytest.skip(missing)
    there = {
        "PYTHONPATH": str(arm64.site_packages(root)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "KVFERRY_CACHE": str(root.with_name("arm64-cache")),
        "KVFERRY_COMPILING_CHILD": "1",  # it compiles for itself: this machine's kernel starts no AArch64 child
    }
    with node([sys.executable], dict(os.environ), tmp_path, "here") as stub:
        expected = answer(stub)
    with node(arm64.interpreter(root), os.environ | there, tmp_path, "there") as stub:
        assert stub.GetNodeStatus(worker_pb2.GetNodeStatusRequest()).kernel_path == "neon-dotprod"
        assert answer(stub) == expected
    assert len(expected) == 12
