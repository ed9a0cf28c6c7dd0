"""What a grammar costs: its first mask, and each token of an answer; alone, and in a batch that decodes.

`python -m kvferry.bench.grammars [MODEL_OR_TOKENIZER ...] [--engine MODEL]`. The first part walks random answers of
some forms through a vocabulary; the second decodes four sessions with and without a form, in turns, and prints the
ratio of the times per step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from kvferry.engine.engine import Engine, EngineOptions
from kvferry.engine.errors import FormatTooComplex
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.sampling import SamplingSettings
from kvferry.engine.scheduler import Job, Scheduler
from kvferry.engine.text.answer_form import ANY_OBJECT, AnswerFormat, JsonSchema, Regex, answer_grammar
from kvferry.engine.text.grammar import GrammarRule, Grammars
from kvferry.engine.text.model import ChatMessage, TextModel
from kvferry.node.rules import RuleAhead

PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "string", "format": "date"},
        "mail": {"type": "string", "format": "email"},
        "kind": {"enum": [f"kind {i}" for i in range(30)]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 8},
        "x": {"type": "number", "minimum": 0, "maximum": 100},
    },
    "required": ["name", "born", "mail", "kind", "tags", "x"],
    "additionalProperties": False,
}
_NAMES: Final = [f"p{i}" for i in range(60)]
LARGE: Final = {
    "type": "object",
    "properties": dict.fromkeys(_NAMES, PERSON),
    "required": _NAMES,
    "additionalProperties": False,
}
FORMS: Final[dict[str, AnswerFormat]] = {
    "schema of 6 fields": JsonSchema(json.dumps(PERSON)),
    "schema of 360 fields": JsonSchema(json.dumps(LARGE)),
    "any object": ANY_OBJECT,
    "regex": Regex(r"(\d{3}-[a-z]{2,8} ?){1,20}"),
    "hostile regex": Regex(r"(\w{1,30} ){1,300}"),
}
N_TOKENS: Final = 400


def walk(rule: GrammarRule, model: TextModel, seed: int) -> list[float]:
    """Seconds of each mask and accept, along a random answer; words rather than ends where there is a choice."""
    chance = random.Random(seed)
    seconds: list[float] = []
    for _ in range(N_TOKENS):
        began = time.perf_counter()
        try:
            mask = rule.mask()
        except FormatTooComplex:
            break
        spent = time.perf_counter() - began
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token_id = int(allowed[chance.randrange(len(allowed))])
        if token_id in model.end_token_ids:
            break
        began = time.perf_counter()
        rule.accept(token_id)
        seconds.append(spent + time.perf_counter() - began)
    return seconds


def masks(path: Path) -> None:
    """One vocabulary."""
    model = TextModel.load(path)
    grammars = Grammars(model)
    began = time.perf_counter()
    grammars.check('start: "a"')
    print(f"{model.model_name}: {model.vocab_size} tokens, vocabulary read in {time.perf_counter() - began:.2f} s")
    print(f"  {'form':22} {'compile':>9} {'median':>9} {'p99':>9} {'largest':>9}")
    for name, form in FORMS.items():
        grammar = answer_grammar(model, content=form)
        began = time.perf_counter()
        grammars.rule(grammar)
        compile_ms = (time.perf_counter() - began) * 1e3
        times = sorted(t * 1e6 for seed in range(4) for t in walk(grammars.rule(grammar), model, seed))
        p99 = times[int(len(times) * 0.99)]
        print(f"  {name:22} {compile_ms:6.1f} ms {statistics.median(times):6.0f} us {p99:6.0f} us {times[-1]:6.0f} us")


def steps(name: str) -> None:
    """A batch of four, free and with a form, by turns."""
    path = resolve_model(name)
    model = TextModel.load(path)
    engine = Engine.load(path, EngineOptions(n_threads=2, kv_bytes=1 << 28))
    grammars, lane = Grammars(model), ThreadPoolExecutor(1)
    prompt = model.first_turn([ChatMessage("user", "Describe some people.")])
    grammar = answer_grammar(model, content=FORMS["schema of 360 fields"])
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(6):
        is_held = bool(number % 2)
        scheduler = Scheduler(engine)
        for i in range(4):
            rule = RuleAhead(grammars.rule(grammar), lane) if is_held else None
            job = Job(
                job_id=str(i), sequence=engine.new_sequence(), token_ids=prompt, n_prompt_tokens=len(prompt),
                sampling=SamplingSettings(temperature=0.8, seed=i), max_tokens=80, end_token_ids=(), rule=rule,
            )  # fmt: skip
            scheduler.submit(job)
        while scheduler.n_running + scheduler.n_queued:
            began = time.perf_counter()
            outputs = scheduler.step()
            if sum(output.token is not None for output in outputs) == 4 and number > 1:
                times[is_held].append(time.perf_counter() - began)
    free, held = (statistics.median(times[kind]) * 1e3 for kind in (False, True))
    worst = max(times[True]) * 1e3
    print(f"four sessions decode: {free:.2f} ms a step free, {held:.2f} ms with a form ({held / free:.3f} x)")
    print(f"  the longest step: {max(times[False]) * 1e3:.2f} ms free, {worst:.2f} ms with a form")
    lane.shutdown()
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["smollm2-135m"])
    parser.add_argument("--engine", default="")
    arguments = parser.parse_args()
    for name in arguments.models:
        masks(resolve_model(name))
    if arguments.engine:
        steps(arguments.engine)


if __name__ == "__main__":
    main()
