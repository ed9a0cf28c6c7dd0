"""Packed weights come from one file, the same everywhere; a file that is not what it should be is refused and made
anew; and what is computed never depends on where the weights lie."""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tests.engine.engine.tiny_models import SHAPES, write_model

from kvferry.engine import packed_file as packed_file_module
from kvferry.engine import weights as weights_module
from kvferry.engine.commands.models import models
from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.errors import ModelInvalid, OutOfResources
from kvferry.engine.files.open_model import open_model
from kvferry.engine.packed_file import DATA_AT, PackFile, PackSpec, PackUnusable, write_pack
from kvferry.engine.packing import pack_model, plan_weights
from kvferry.engine.weights import SMALL_BYTES, choose, load_weights, pack_path, packs_folder

TOKENS = np.arange(40, dtype=np.int32)
MODES = ["memory", "mmap", "stream"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVFERRY_CACHE", str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path, cache: Path) -> Path:
    write_model(tmp_path / "tiny.gguf", SHAPES["small heads, untied"])
    return tmp_path / "tiny.gguf"


def spec_of(model: Path) -> PackSpec:
    file = open_model(model)
    return PackSpec(plan_weights(file), file.weights_sha256())


def computed(model: Path, mode: str) -> tuple[str, str]:
    """Fingerprint, and the digest of some logits."""
    engine = Engine.load(model, EngineOptions(n_threads=2, kv_bytes=1 << 22, weights=mode))
    try:
        logits = [engine.forward([Chunk(engine.new_sequence(), TOKENS, "all")])[0] for _ in range(2)]
        assert logits[0].tobytes() == logits[1].tobytes()  # pages that were let go of come back as they were
        return engine.fingerprint, hashlib.sha256(logits[0].tobytes()).hexdigest()
    finally:
        engine.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_computed_does_not_depend_on_where_weights_lie(
    tmp_path: Path, cache: Path, monkeypatch, shape: str
) -> None:
    write_model(tmp_path / "tiny.gguf", SHAPES[shape])
    assert len(found_everywhere(tmp_path / "tiny.gguf", monkeypatch)) == 1


@pytest.mark.parametrize("name", ["qwen3moe_nonorm_f32", "qwen3_untied_f32"])
def test_experts_and_float_weights_come_out_of_the_file_as_they_were_packed(
    recorded, cache: Path, monkeypatch, name: str
) -> None:
    assert len(found_everywhere(recorded(name) / "model", monkeypatch)) == 1


def found_everywhere(model: Path, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """What ``computed`` finds in every mode; streamed with all pages let go of, and with some kept."""
    found = {computed(model, mode) for mode in [*MODES, "auto"]}
    monkeypatch.setattr(weights_module, "STREAM_KEEPS", 0)
    return found | {computed(model, "stream")}


def test_streaming_keeps_what_every_step_reads_within_its_allowance_and_no_experts(recorded) -> None:
    plan = plan_weights(open_model(recorded("qwen3moe_nonorm_f32") / "model"))
    experts = sum(part.n_bytes for part in plan.parts if len(part.tensors) > 1)
    always = plan.n_bytes - experts

    def let_go(kept_bytes: int) -> int:
        model, layers = plan.records(0)
        plan.let_go_behind_layers(0, model, layers, kept_bytes)
        assert not (model["head_pages_at"] % 4096).any()
        assert not (layers["pages_at"] % 4096).any()
        return int(model["head_pages_bytes"].sum() + layers["pages_bytes"].sum())

    assert experts > 0
    assert experts <= let_go(always) < let_go(always // 2) < let_go(0)
    assert let_go(always) < experts + 4096 * len(plan.parts)  # pages that two parts share
    assert let_go(0) - let_go(always // 2) <= always // 2


def test_the_file_holds_the_region_as_in_memory_and_is_the_same_wherever_it_is_made(
    tmp_path: Path, model: Path
) -> None:
    file, spec = open_model(model), spec_of(model)
    for name in ("one", "two"):
        write_pack(tmp_path / name, file, spec)
    body = (tmp_path / "one").read_bytes()
    assert (tmp_path / "two").read_bytes() == body
    region = pack_model(file, 512).region.tobytes()
    assert body[DATA_AT : DATA_AT + len(region)] == region
    assert spec.plan.n_bytes == len(region)
    assert all(part.offset % (4096 if part.kind is not None else 64) == 0 for part in spec.plan.parts)


def test_a_start_makes_the_file_once_and_the_next_one_reads_it(model: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    computed(model, "mmap")
    path = pack_path(spec_of(model))
    made = path.stat()
    assert sum("packed in" in line for line in caplog.messages) == 1
    computed(model, "memory")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    assert sum("packed in" in line for line in caplog.messages) == 1


def test_a_small_model_leaves_no_file_behind_unless_it_is_asked_for(model: Path) -> None:
    assert spec_of(model).plan.n_bytes < SMALL_BYTES
    computed(model, "auto")
    assert not packs_folder().exists()


def flipped(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 0x10]) + body[at + 1 :]


DAMAGES = {
    "cut": lambda body: body[:-1],
    "cut in the weights": lambda body: body[: DATA_AT + 5000],
    "empty": lambda body: b"",
    "longer": lambda body: body + b"\0",
    "other magic": lambda body: flipped(body, 0),
    "later version": lambda body: flipped(body, 8),
    "other head": lambda body: flipped(body, 300),
    "a weight": lambda body: flipped(body, DATA_AT + 5000),
    "the first weight": lambda body: flipped(body, DATA_AT),
    "a digest": lambda body: flipped(body, len(body) - 33),
    "the seal": lambda body: flipped(body, len(body) - 1),
    "zeros": lambda body: bytes(len(body)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_in_one_sentence_and_made_anew(model: Path, caplog, damage: str, mode: str) -> None:
    expected = computed(model, mode)
    path = pack_path(spec_of(model))
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert computed(model, mode) == expected
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert warnings[0].endswith("; it is made anew")
    assert path.read_bytes() == whole


def test_the_packed_file_of_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    computed(model, "mmap")
    write_model(tmp_path / "other.gguf", SHAPES["small heads, untied"], seed=7)
    other = spec_of(tmp_path / "other.gguf")
    shutil.copy(pack_path(spec_of(model)), pack_path(other))
    with pytest.raises(PackUnusable, match="another model"):
        PackFile(pack_path(other), other)


def test_every_flipped_byte_of_the_weights_is_found_by_verify(tmp_path: Path, model: Path) -> None:
    spec = spec_of(model)
    write_pack(tmp_path / "pack", open_model(model), spec)
    whole = (tmp_path / "pack").read_bytes()
    covered = [at for piece in spec.pieces for at in (piece.offset, piece.offset + piece.n_bytes - 1)]

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.one_of(st.sampled_from(covered), st.integers(0, spec.plan.n_bytes - 1)))
    def check(at: int) -> None:
        is_covered = any(piece.offset <= at < piece.offset + piece.n_bytes for piece in spec.pieces)
        (tmp_path / "flipped").write_bytes(flipped(whole, DATA_AT + at))
        pack = PackFile(tmp_path / "flipped", spec)
        try:
            if is_covered:
                with pytest.raises(PackUnusable, match="not what was written"):
                    pack.verify()
            else:
                pack.verify()  # nobody reads what lies between two parts
        finally:
            pack.close()

    check()


def test_a_changed_source_is_packed_anew(model: Path) -> None:
    before = computed(model, "mmap")
    write_model(model, SHAPES["small heads, untied"], seed=7)
    after = computed(model, "mmap")
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert len(list(packs_folder().glob("*.kvfpack"))) == 2


@pytest.mark.parametrize("want", ["mmap", "memory", "auto"])
def test_a_source_that_is_replaced_while_it_is_opened_lends_its_name_to_no_other_weights(
    model: Path, want: str
) -> None:
    """Under its digest the other one's rows would be saved, and at every later start its weights be read."""
    file = open_model(model)
    write_model(model.with_name("other.gguf"), SHAPES["small heads, untied"], seed=7)
    model.with_name("other.gguf").replace(model)
    with pytest.raises(ModelInvalid, match="was replaced or written to"):
        load_weights(file, quant="q8", context_length=64, want=want)
    assert not list(packs_folder().glob("*.kvfpack"))


def test_a_source_that_is_written_to_while_it_is_packed_leaves_no_file(model: Path, monkeypatch) -> None:
    pack_pieces = packed_file_module.pack_pieces

    def pack_and_be_overtaken(*what: object) -> None:
        pack_pieces(*what)
        write_model(model, SHAPES["small heads, untied"], seed=7)

    monkeypatch.setattr(packed_file_module, "pack_pieces", pack_and_be_overtaken)
    with pytest.raises(ModelInvalid, match="was replaced or written to"):
        load_weights(open_model(model), quant="q8", context_length=64, want="mmap")
    assert not list(packs_folder().glob("*.kvfpack"))


def test_weights_that_no_block_holds_leave_no_file(tmp_path: Path, recorded, cache: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(recorded("qwen3_untied_f32") / "model", folder)
    weights = next(folder.glob("*.safetensors"))
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][-1, -1] = np.nan
    save_file(tensors, weights)
    with pytest.raises(ModelInvalid, match="float16 scale"):
        computed(folder, "mmap")
    assert not [path for path in packs_folder().iterdir() if not path.name.startswith(".lock")]


def test_a_cache_that_cannot_be_written_costs_one_log_line(model: Path, cache: Path, caplog) -> None:
    expected = computed(model, "memory")
    shutil.rmtree(cache)
    cache.write_text("a file where a folder should be")
    assert computed(model, "mmap") == expected
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "packed into memory" in warning
    assert str(cache) in warning


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_full_disk_costs_one_log_line_and_what_no_memory_holds_is_refused(model: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(weights_module.shutil, "disk_usage", lambda folder: Usage(1 << 40, 1 << 40, 1000))
    computed(model, "stream")
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "make room" in warning
    monkeypatch.setattr(weights_module, "available_memory", lambda: 1 << 20)
    with pytest.raises(OutOfResources, match="are available"):
        computed(model, "stream")


def test_processes_that_start_at_once_pack_once(model: Path, monkeypatch) -> None:
    n_written = []
    write = weights_module.write_pack
    monkeypatch.setattr(weights_module, "write_pack", lambda *args: (n_written.append(1), write(*args)))

    def load() -> None:
        load_weights(open_model(model), quant="q8", context_length=64, want="mmap")

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(n_written) == 1


@pytest.mark.parametrize(
    ("want", "n_needed", "chosen"),
    [
        ("auto", 8, "memory"),
        ("auto", 9, "mmap"),
        ("auto", 11, "stream"),
        ("memory", 11, "memory"),
        ("stream", 1, "stream"),
    ],
)
def test_auto_chooses_by_what_is_needed_and_available(want, n_needed: int, chosen: str) -> None:
    assert choose(want, n_needed << 30, 10 << 30)[0] == chosen


def test_pack_and_verify_on_the_command_line(model: Path) -> None:
    run = CliRunner().invoke
    packed = run(models, ["pack", str(model)])
    assert packed.exit_code == 0, packed.output
    path = pack_path(spec_of(model))
    assert str(path) in packed.output
    assert run(models, ["verify", str(model)]).output == f"{path}: every byte is as it was packed\n"
    path.write_bytes(flipped(path.read_bytes(), DATA_AT + 70))
    result = run(models, ["verify", str(model)])
    assert isinstance(result.exception, PackUnusable)
    assert result.exception.exit_code == 4
    assert run(models, ["pack", str(model)]).exit_code == 0
    assert run(models, ["verify", str(model)]).exit_code == 0
