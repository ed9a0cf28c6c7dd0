"""The packing bench, driven with a made-up model."""

from pathlib import Path

from click.testing import CliRunner
from tests.engine.engine.tiny_models import SHAPES, write_model

from kvferry.bench.packing import main


def test_it_prints_how_fast_a_model_is_packed(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", SHAPES["small heads, untied"])
    done = CliRunner().invoke(main, ["--model", str(tmp_path / "tiny.gguf"), "--runs", "1"])
    assert done.exit_code == 0, done.output
    assert "memory" in done.output
    assert "a file, durable" in done.output
