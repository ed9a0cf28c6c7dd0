"""Models that see: against the oracle, and under the bit contract with images in the prompt."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvferry.engine.engine import Chunk, Engine, EngineOptions
from kvferry.engine.errors import InvalidTokens, UnsupportedArchitecture
from kvferry.engine.kv_cache import KvSequence
from kvferry.engine.sampling import SamplingSettings
from kvferry.engine.scheduler import Job, Scheduler
from kvferry.engine.vision.positions import grids_of
from kvferry.engine.vision.sight import SeenPrompt

spec = importlib.util.spec_from_file_location("recorded_models", Path(__file__).parent / "recorded_models.py")
models = importlib.util.module_from_spec(spec)
sys.modules["recorded_models"] = models
spec.loader.exec_module(models)

SEEING_MODELS = ["qwen3vl_tied_bf16", "qwen3vl_untied_f32", "qwen3vlmoe_bf16"]
RMS_RATIO = 1.7
FEATURE_NOISE = 0.04  # of int8 in the tower, relative; a wrong order of patches or a lacking part costs 0.3 and more


@dataclass
class Case:
    """An engine, the recorded answers of its model, and facts about them."""

    engine: Engine
    golden: dict[str, Any]
    facts: dict[str, Any]

    def prompt(self, name: str) -> tuple[np.ndarray, SeenPrompt]:
        vision = self.engine.config.vision
        assert vision is not None
        ids = self.golden[f"{name}.input_ids"].astype(np.int32)
        grids = grids_of(self.golden[f"{name}.image_grid_thw"], vision)
        features = self.engine.tower.see(self.golden[f"{name}.pixel_values"], grids)
        return ids, SeenPrompt.of_prompt(ids, grids, features, vision)


def load(folder: Path, n_threads: int = 1) -> Case:
    options = EngineOptions(n_threads=n_threads, kv_bytes=models.KV_BYTES, context_length=2048)
    engine = Engine.load(folder / "model", options)
    return Case(engine, load_file(folder / "golden.safetensors"), json.loads((folder / "golden.json").read_text()))


@pytest.fixture(scope="module", params=SEEING_MODELS)
def case(request: pytest.FixtureRequest, recorded: Callable[[str], Path]) -> Iterator[Case]:
    made = load(recorded(request.param))
    yield made
    made.engine.close()


def run(engine: Engine, ids: np.ndarray, seen: SeenPrompt, sizes: list[int], sequence: KvSequence | None = None) -> Any:
    """Append the rest of a prompt in chunks of these sizes, over and over."""
    sequence = sequence or engine.new_sequence()
    parts, i = [], 0
    while sequence.n_rows < len(ids):
        start = sequence.n_rows
        stop = min(start + sizes[i % len(sizes)], len(ids))
        parts.append(engine.forward([Chunk(sequence, ids[start:stop], "all", seen.sight(start, stop))])[0])
        i += 1
    return sequence, np.concatenate(parts)


def image_prompts(case: Case) -> list[str]:
    return [name for name in case.facts["prompts"] if name.startswith("img")]


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))


def test_features_positions_and_logits_are_the_oracles(case: Case) -> None:
    for name in image_prompts(case):
        expected = {key.split(".", 1)[1]: value for key, value in case.golden.items() if key.startswith(f"{name}.")}
        ids, seen = case.prompt(name)
        features = case.engine.tower.see(
            expected["pixel_values"], grids_of(expected["image_grid_thw"], case.engine.config.vision)
        )
        assert relative(features.embeds, expected["image_embeds"]) <= FEATURE_NOISE
        assert relative(features.deepstack.transpose(1, 0, 2), expected["deepstack"]) <= FEATURE_NOISE
        assert np.array_equal(seen.sight(0, len(ids)).positions, expected["position_ids"])
        assert seen.rope_delta == expected["rope_delta"][0]
        sequence, logits = run(case.engine, ids, seen, [512])
        if not case.facts["moe_layers"]:  # of the mixture hardly a position has a router margin that noise leaves alone
            simulated = case.facts["sim_int8"]["a8_with_vision"][name]["rms"]
            difference = logits[expected["logit_positions"]] - expected["logits"]
            assert np.sqrt(np.mean(difference**2)) <= RMS_RATIO * simulated
            assert_greedy(case.engine, sequence, seen, logits[-1], expected)
        sequence.release()


def assert_greedy(
    engine: Engine, sequence: KvSequence, seen: SeenPrompt, logits: Any, expected: dict[str, Any]
) -> None:
    """Tokens after the images stand where the oracle has them."""
    for token, margin in zip(expected["greedy_ids"], expected["greedy_margins"], strict=True):
        found = int(np.argmax(logits))
        if found != token:
            assert margin <= 0.6
            return
        start = sequence.n_rows
        sight = seen.sight(start, start + 1)
        logits = engine.forward([Chunk(sequence, np.array([found], np.int32), "last", sight)])[0][0]


@pytest.mark.parametrize("sizes", [[1], [7], [5, 1, 20]], ids=str)
def test_any_chunking(case: Case, sizes: list[int]) -> None:
    ids, seen = case.prompt("img1")
    expected = models.bits(case.engine, *run(case.engine, ids, seen, [512]))
    assert models.bits(case.engine, *run(case.engine, ids, seen, sizes)) == expected


def test_restored_inside_an_image_beside_another_sequence(case: Case) -> None:
    engine = case.engine
    ids, seen = case.prompt("img1")
    first_image = int(np.argmax(ids == engine.config.vision.image_token_id))
    n_restored = first_image + 3
    whole, logits = run(engine, ids, seen, [512])
    k, v = models.rows(engine, whole)
    restored, other = engine.new_sequence(), engine.new_sequence()
    for layer in range(engine.geometry.n_layers):
        restored.write_rows(layer, 0, k[layer, :n_restored].copy(), v[layer, :n_restored].copy())
    restored.commit(n_restored)
    tail = Chunk(restored, ids[n_restored:], "all", seen.sight(n_restored, len(ids)))
    found = engine.forward([Chunk(other, np.arange(9, dtype=np.int32)), tail])[1]
    expected = models.bits(engine, whole, logits)
    assert models.bits(engine, restored, np.concatenate([logits[:n_restored], found])) == expected
    other.release()


def test_an_images_features_depend_on_it_alone(recorded: Callable[[str], Path]) -> None:
    """Two images together are each as alone; so they are with more threads."""
    folder = recorded("qwen3vl_tied_bf16")
    one, three = load(folder), load(folder, n_threads=3)
    grids = grids_of(one.golden["img2.image_grid_thw"], one.engine.config.vision)
    pixels = one.golden["img2.pixel_values"]
    n = grids[0].n_patches
    both = one.engine.tower.see(pixels, grids)
    apart = [one.engine.tower.see(pixels[:n], grids[:1]), one.engine.tower.see(pixels[n:], grids[1:])]
    threaded = three.engine.tower.see(pixels, grids)
    for field in ("embeds", "deepstack"):
        expected = getattr(both, field).tobytes()
        assert np.concatenate([getattr(part, field) for part in apart]).tobytes() == expected
        assert getattr(threaded, field).tobytes() == expected
    one.engine.close()
    three.engine.close()


def test_what_cannot_be_seen_is_refused(case: Case, recorded: Callable[[str], Path]) -> None:
    grids = grids_of(case.golden["img1.image_grid_thw"], case.engine.config.vision)
    with pytest.raises(InvalidTokens, match="the grids ask for"):
        case.engine.tower.see(case.golden["img1.pixel_values"][:-1], grids)
    blind = Engine.load(recorded("qwen3_untied_f32") / "model", EngineOptions(n_threads=1, kv_bytes=1 << 22))
    with pytest.raises(UnsupportedArchitecture, match="takes no images"):
        _ = blind.tower
    blind.close()


def scheduled(case: Case, prompts: list[tuple[np.ndarray, SeenPrompt | None]], **options: Any) -> list[list[int]]:
    """Each prompt's answer of eight tokens, all in one batch."""
    scheduler = Scheduler(case.engine, **options)
    answers: dict[str, list[int]] = {}
    sequences = [case.engine.new_sequence() for _ in prompts]
    for number, (ids, seen) in enumerate(prompts):
        answers[str(number)] = []
        scheduler.submit(
            Job(
                job_id=str(number), sequence=sequences[number], token_ids=ids, n_prompt_tokens=len(ids),
                sampling=SamplingSettings(), max_tokens=8, end_token_ids=(), seen=seen,
            )
        )  # fmt: skip
    while scheduler.n_running + scheduler.n_queued:
        for output in scheduler.step():
            if output.token is not None:
                answers[output.job_id].append(output.token.token_id)
    for sequence in sequences:
        sequence.release()
    return list(answers.values())


def test_a_batch_with_pictures_answers_each_as_alone(case: Case) -> None:
    """The same prompt with another picture is not the same prompt, although its tokens are; with the same it is."""
    ids, seen = case.prompt("img1")
    ids = np.concatenate([ids, np.arange(40, dtype=np.int32)])  # whole blocks are shared
    image = seen.images[0]
    pixels = case.golden["img1.pixel_values"][: image.grid.n_patches]
    dark = case.engine.tower.see(-pixels, [image.grid])
    merge = case.engine.config.vision.merge_size
    others = tuple(dataclasses.replace(i, content_hash=b"dark" * 8) if i is image else i for i in seen.images)
    sights = {b"dark" * 8: dark} | {i.content_hash: seen._features[i.content_hash] for i in seen.images}
    prompts = [(ids, seen), (ids, SeenPrompt(others, sights, merge)), (ids, seen), (ids[:9], None)]
    alone = [scheduled(case, [prompt])[0] for prompt in prompts]
    assert alone[0] != alone[1]
    for options in ({}, {"row_budget": 16, "max_running": 2}):
        assert scheduled(case, prompts, **options) == alone
