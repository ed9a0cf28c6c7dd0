"""The coordinator's process is killed under many streams; each client goes on from where it was (promise 21)."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest
from cluster_kit import Client, Processes, ids_of, read_while_it_lasts, resume_until_served, take_tokens
from scripted_worker import scripted_answer

from kvferry.coordinator.loaded_model import LoadedModel
from kvferry.engine.text.model import ChatMessage

N_STREAMS, N_TOKENS = 10, 60


@pytest.mark.parametrize("n_kills", [3, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_21_a_killed_coordinator_loses_no_token_that_a_client_has(
    processes: Processes, model: LoadedModel, tmp_path: Path, n_kills: int
) -> None:
    """Ten streams a kill, at any token of each: 30 interrupted streams, 300 in the long run."""
    flags = ("--lease", "0.6", "--log-level", "error")
    coordinator, address = processes.coordinator("", *flags)
    for name in "ab":
        processes.worker(name, address, "--token-seconds", "0.02")
    client, rng, n_interrupted = Client(address), random.Random(21), 0
    try:
        await client.until_nodes(2)
        for number in range(n_kills):
            sessions = [await client.new_session() for _ in range(N_STREAMS)]
            texts = [f"Question {number}.{i}" for i in range(N_STREAMS)]
            streams = [
                client.generate(session, text, max_tokens=N_TOKENS, seed=i)
                for i, (session, text) in enumerate(zip(sessions, texts, strict=True))
            ]
            firsts = await asyncio.gather(*(take_tokens(s, rng.randrange(1, N_TOKENS // 3)) for s in streams))
            coordinator.send_signal(signal.SIGKILL)
            rests = await asyncio.gather(*(read_while_it_lasts(stream) for stream in streams))
            coordinator.wait()
            coordinator, _ = processes.coordinator(address, *flags)
            for i, (first, (more, error)) in enumerate(zip(firsts, rests, strict=True)):
                seen = first + ids_of(more)
                if error is not None:
                    n_interrupted += 1
                    seen += ids_of(await resume_until_served(client, sessions[i], len(seen)))
                prompt = model.text.first_turn([ChatMessage("user", texts[i])])
                assert seen == scripted_answer(prompt, i, N_TOKENS), processes.logs()
        assert n_interrupted >= 0.9 * n_kills * N_STREAMS  # a few were over before the signal came
    finally:
        await client.channel.close()
