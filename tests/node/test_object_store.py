"""Nodes that share an S3 store, with a real server: it may be absent, and it may die."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from .running_node import running_node
from .test_with_store import save

Prompts = dict[str, list[int]]
ANSWER = {"max_tokens": 8, "end_token_ids": []}


@pytest.mark.slow
def test_sessions_go_on_from_s3_and_a_server_that_is_away_costs_no_answer(
    tmp_path: Path,
    smollm2_path: Path,
    prompts: Prompts,
    new_s3_server: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = new_s3_server()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    flags = ("--store", f"s3://{server.bucket}/fleet", "--kv-memory", "256MiB", "--context", "2048")
    first, long, last = ([n, *prompts[name]] for n, name in ((3, "multi"), (4, "long"), (5, "chat_en")))
    with running_node(tmp_path / "a", smollm2_path, *flags) as a:
        assert len(a.run_turn(first, session="first", **ANSWER).tokens) == 8  # nobody is there yet
        load = a.wait_for("not load.store_ok").load
        assert f"s3://{server.bucket}/fleet does not answer; AWS_ENDPOINT_URL says which server" in load.store_error
        assert len(load.store_error) < 250
        server.start()
        a.wait_for("load.store_ok", seconds=30)
        answer = a.run_turn(long, session="long", **ANSWER)
        assert save(a, "long").n_tokens == len(long) + 7
        following = [*long, *answer.tokens, 7, 8, 9]
        expected = a.run_turn(following, session="long", **ANSWER).tokens
        with running_node(tmp_path / "b", smollm2_path, *flags) as b:
            resumed = b.run_turn(following, session="elsewhere", **ANSWER)
            assert resumed.sources[1] >= len(long) + 7
            assert resumed.tokens == expected
            _check_a_death_in_a_save(server, a, b, last)


def _check_a_death_in_a_save(server: Any, a: Any, b: Any, prompt: list[int]) -> None:
    answer = a.run_turn(prompt, session="last", **ANSWER)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save, a, "last")
        server.kill()
        assert saving.exception(60) is None or isinstance(saving.exception(), grpc.RpcError)
    following = [*prompt, *answer.tokens, 7, 8, 9]
    expected = a.run_turn(following, session="last", **ANSWER).tokens
    assert len(expected) == 8
    a.wait_for("not load.store_ok", seconds=30)
    assert b.run_turn(following, session="recomputed", **ANSWER).tokens == expected
    server.start()
    for node in (a, b):
        node.wait_for("load.store_ok", seconds=60)
    save(a, "last")
    b.drop_all()
    resumed = b.run_turn([*following, *expected, 1], session="restored", **ANSWER)
    assert resumed.sources[1] >= len(following) + 7
    assert resumed.tokens == a.run_turn([*following, *expected, 1], session="last", **ANSWER).tokens
