"""`make bench-quality`: what int8 activations, 4- and 8-bit weights and narrow K/V rows cost, against recorded answers.

The demo model on a text of 1,000 tokens and four prompts that the oracle answered (float32, an independent program),
and small models of every architecture with random weights. Logits of the whole text come from our own float path, which
the tests hold to the oracle's perplexity and tokens. Limits are the tolerance guide's that came with the recordings.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.files.model_file import ModelFile
from kvferry.engine.files.open_model import open_model
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.files.tensors import Tensor
from kvferry.engine.kv_cache import KvKind
from kvferry.engine.packing import Quant, pack_model
from kvferry.engine.reference import ReferenceModel

_F32 = NDArray[np.float32]
_I32 = NDArray[np.int32]

CONTEXT: Final = 2048
N_GREEDY: Final = 64
TOP: Final = 20
CLEAR_ROUTER_MARGIN: Final = 0.1  # below it int8 may send a token to another expert, which is no error
RMS_RATIO: Final = 1.7
PROJECT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Limits:
    """The guide's, for a path with int8 activations. Margins are the oracle's, between its two best tokens."""

    nll_difference: float = 0.015
    top1: float = 0.94
    flipped_margin: float = 0.6
    divergence: float = 0.006
    rms: float = 0.35
    top20: float = 16.0


LIMITS: Final = Limits()


@dataclass(frozen=True)
class Quality:
    """How the logits of a text differ from the oracle's.

    ``nll_difference`` of the mean, in nats a token; ``top1``: the share of positions with the same best token;
    ``flipped_margin``: the largest margin among the others; ``divergence``: mean Kullback-Leibler, in nats; ``rms`` of
    the logits; ``top20``: how many of the 20 best tokens are the same, at the mean.
    """

    perplexity: float
    nll_difference: float
    top1: float
    flipped_margin: float
    divergence: float
    rms: float
    top20: float

    def beyond(self, limits: Limits = LIMITS) -> list[str]:
        """Names of the figures that are not within the limits."""
        too_large = [
            name
            for name in ("nll_difference", "flipped_margin", "divergence", "rms")
            if not abs(getattr(self, name)) <= getattr(limits, name)
        ]
        return too_large + [name for name in ("top1", "top20") if not getattr(self, name) >= getattr(limits, name)]


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def compare(found: _F32, exact: _F32, token_ids: _I32, oracle_nll: float) -> Quality:
    """Of a text's logits [n, vocab]; ``oracle_nll``: the oracle's mean over tokens 1 .. n - 1."""
    nll, divergence, squares, shared = [], [], 0.0, []
    for start in range(0, len(found), 100):  # in parts: these are float64
        ours, theirs = log_softmax(found[start : start + 100]), log_softmax(exact[start : start + 100])
        following = token_ids[start + 1 : start + 101]
        nll += [-row[token] for row, token in zip(ours, following, strict=False)]
        divergence += list((np.exp(theirs) * (theirs - ours)).sum(axis=-1))
        squares += float(np.square(found[start : start + 100] - exact[start : start + 100], dtype=np.float64).sum())
        shared += [len(a & b) for a, b in zip(_best(ours), _best(theirs), strict=True)]
    same = found.argmax(axis=-1) == exact.argmax(axis=-1)
    best_two = np.partition(exact[~same], -2, axis=-1)[:, -2:]
    mean_nll = float(np.mean(nll))
    return Quality(
        perplexity=float(np.exp(mean_nll)),
        nll_difference=mean_nll - oracle_nll,
        top1=float(same.mean()),
        flipped_margin=float((best_two[:, 1] - best_two[:, 0]).max(initial=0.0)),
        divergence=float(np.mean(divergence)),
        rms=float(np.sqrt(squares / found.size)),
        top20=float(np.mean(shared)),
    )


def _best(rows: NDArray[Any]) -> Iterator[set[int]]:
    return (set(row) for row in np.argpartition(rows, -TOP, axis=-1)[:, -TOP:].tolist())


@dataclass(frozen=True, slots=True)
class AsFloats:
    """A tensor given as the floats it stands for, so that the engine's own quantiser gets to work on it."""

    tensor: Tensor
    kind: str = "f32"

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape

    def read(self, start: int = 0, stop: int | None = None) -> _F32:
        return self.tensor.read(start, stop)

    def stored(self, start: int = 0, stop: int | None = None) -> None:  # noqa: ARG002 - the protocol's
        return None


def with_weights(file: ModelFile, weights: str) -> tuple[ModelFile, Quant]:
    """The model with its weights ``as stored``, or quantised by the engine from floats to ``q8`` or ``q4``."""
    if weights == "as stored":
        return file, "q8"
    floats = {name: AsFloats(tensor) for name, tensor in file.tensors.items()}
    return replace(file, tensors=floats), "q4" if weights == "q4" else "q8"


class DemoModel:
    """The demo model's recorded answers."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.facts: dict[str, Any] = json.loads((folder / "golden.json").read_text())
        self.file = open_model(path)
        self.text = np.array(self.facts["ppl"]["input_ids"], np.int32)
        self.exact: _F32 = ReferenceModel.load(path).forward(self.text).logits

    def engine(self, weights: str, kv: KvKind, n_threads: int) -> Engine:
        file, quant = with_weights(self.file, weights)
        packed = pack_model(file, CONTEXT, quant)
        return Engine(packed, EngineOptions(n_threads=n_threads, kv_bytes=256 << 20, kv=kv), "0" * 32)

    def quality(self, engine: Engine) -> Quality:
        sequence = engine.new_sequence()
        logits = engine.forward([Chunk(sequence, self.text, "all")])[0]
        sequence.release()
        return compare(logits, self.exact, self.text, self.facts["ppl"]["mean_nll"])

    def greedy_margin(self, engine: Engine) -> float:
        """The largest of the oracle's margins where its greedy answers and ours part; 0 where none does."""
        return max(self._first_margin(engine, prompt) for prompt in self.facts["prompts"].values())

    def _first_margin(self, engine: Engine, prompt: Mapping[str, Any]) -> float:
        sequence = engine.new_sequence()
        logits = engine.forward([Chunk(sequence, np.array(prompt["input_ids"], np.int32))])[0][0]
        margin = 0.0
        for token, oracle_margin in zip(prompt["greedy_64_ids"], prompt["greedy_margins"], strict=False):
            if int(logits.argmax()) != token:
                margin = float(oracle_margin)
                break
            logits = engine.forward([Chunk(sequence, np.array([token], np.int32))])[0][0]
        sequence.release()
        return margin


def demo_table(demo: DemoModel, n_threads: int) -> tuple[Table, bool]:
    """All weights with all K/V rows; and whether everything is within the limits."""
    n = len(demo.text)
    title = f"{demo.file.path.name}: {n} tokens, the oracle's perplexity {demo.facts['ppl']['ppl']:.4f}"
    heads = (
        "weights",
        "K/V rows",
        "perplexity",
        "d NLL",
        "top-1",
        "margin",
        "KL",
        "rms",
        "top 20",
        "greedy",
        "verdict",
    )
    table = Table(*heads, title=title)
    ok = True
    for weights in ("as stored", "q8", "q4"):
        for kv in KvKind:
            engine = demo.engine(weights, kv, n_threads)
            found, greedy = demo.quality(engine), demo.greedy_margin(engine)
            engine.close()
            beyond = found.beyond() + (["greedy"] if greedy > LIMITS.flipped_margin else [])
            ok = ok and not beyond
            figures = (
                f"{found.perplexity:.4f}",
                f"{found.nll_difference:+.4f}",
                f"{found.top1:.3f}",
                f"{found.flipped_margin:.2f}",
                f"{found.divergence:.4f}",
                f"{found.rms:.3f}",
                f"{found.top20:.1f}",
                f"{greedy:.2f}",
            )
            table.add_row(weights, kv, *figures, f"beyond: {', '.join(beyond)}" if beyond else "within")
    limits = (LIMITS.top1, LIMITS.flipped_margin, LIMITS.divergence, LIMITS.rms, LIMITS.top20, LIMITS.flipped_margin)
    signs = (">=", "<=", "<=", "<=", ">=", "<=")
    cells = (f"{sign} {limit:g}" for sign, limit in zip(signs, limits, strict=True))
    table.add_section()
    table.add_row("limit", "", "", f"+-{LIMITS.nll_difference:g}", *cells, "")
    return table, ok


def rms_ratio(folder: Path, kv: KvKind, n_threads: int) -> float:
    """The logits' error on a recorded model, as a multiple of what int8 cost in the oracle's simulation; the worst
    prompt. NaN where no position is routed clearly enough to judge."""
    golden, facts = load_file(folder / "golden.safetensors"), json.loads((folder / "golden.json").read_text())
    options = EngineOptions(n_threads=n_threads, kv_bytes=1 << 25, context_length=CONTEXT, kv=kv)
    engine = Engine.load(folder / "model", options)
    ratios = []
    for prompt in ("p5", "p37", "p300"):
        positions = golden[f"{prompt}.logit_positions"][: _clearly_routed(golden, prompt)]
        simulated = facts["sim_int8"]["w8a8_kv8"][prompt]
        simulated = simulated.get("with_forced_routing", simulated)
        if not len(positions):
            continue
        sequence = engine.new_sequence()
        logits = engine.forward([Chunk(sequence, golden[f"{prompt}.input_ids"].astype(np.int32), "all")])[0]
        sequence.release()
        difference = logits[positions] - golden[f"{prompt}.logits"][: len(positions)]
        ratios.append(float(np.sqrt(np.mean(np.square(difference)))) / simulated["rms"])
    engine.close()
    return max(ratios, default=float("nan"))


def _clearly_routed(golden: Mapping[str, Any], prompt: str) -> int:
    """How many of the recorded positions come before one that a little noise may send to other experts."""
    n = len(golden[f"{prompt}.logit_positions"])
    if f"{prompt}.router_logits" not in golden:
        return n
    n_active = golden[f"{prompt}.router_topk_ids"].shape[-1]
    ordered = np.sort(golden[f"{prompt}.router_logits"], axis=-1)
    margins = (ordered[..., -n_active] - ordered[..., -n_active - 1]).min(axis=0)
    unclear = np.flatnonzero(margins < CLEAR_ROUTER_MARGIN)
    return int(unclear[0]) if len(unclear) else n


def recorded_models(collection: Path) -> list[Path]:
    """Folders of recorded text models, by name."""
    found = sorted(path.parent for path in collection.glob("*/golden.safetensors"))
    return [folder for folder in found if "vl" not in folder.name]


def models_table(folders: Sequence[Path], n_threads: int) -> tuple[Table, bool]:
    """Every recorded model with all K/V rows."""
    table = Table(
        "model", *KvKind, "verdict", title="random weights: rms error of logits / what int8 costs in simulation"
    )
    ok = True
    for folder in folders:
        ratios = [rms_ratio(folder, kv, n_threads) for kv in KvKind]
        is_within = all(ratio <= RMS_RATIO for ratio in ratios if not math.isnan(ratio))
        ok = ok and is_within
        table.add_row(folder.name, *(f"{ratio:.2f}" for ratio in ratios), "within" if is_within else "beyond")
    table.add_section()
    table.add_row("limit", *[f"<= {RMS_RATIO:g}"] * len(KvKind), "")
    return table, ok


@click.command()
@click.option("--model", default="smollm2-135m", help="The file whose answers are recorded.")
@click.option(
    "--oracle", type=click.Path(path_type=Path, exists=True), help="Recorded answers; default: ../shared/oracle."
)
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
def main(model: str, oracle: Path | None, threads: int) -> None:
    """Print both tables; exit with 1 when a figure is beyond its limit."""
    beside, own = PROJECT.parent / "shared" / "oracle", PROJECT / "tests" / "golden"
    collection = oracle or (beside if beside.is_dir() else own)
    console = Console(width=140)
    console.print(f"recorded answers: {collection.name} of {collection.parent.name}", markup=False)
    demo = DemoModel(collection / "smollm2_q4_1", resolve_model(model))
    table, ok = demo_table(demo, threads)
    console.print(table)
    others, also_ok = models_table(recorded_models(collection), threads)
    console.print(others)
    sys.exit(0 if ok and also_ok else 1)


if __name__ == "__main__":
    main()
