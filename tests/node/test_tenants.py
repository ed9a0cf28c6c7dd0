"""Promise 32: nothing that one tenant sent is reused for another, in memory or in the store; and no clock tells."""

from __future__ import annotations

import math
import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.engine.kv_cache import KvSequence
from kvferry.node.messages import RestoreDone, RestoreRequest
from kvferry.store import names
from kvferry.store.geometry import KvGeometry
from kvferry.store.seals import KeyedSeal, PlainSeal, Seal
from kvferry.store.snapshot_store import SnapshotStore
from kvferry.store.vlkv3 import parse_extent

from .running_node import Answer, RunningNode, running_node
from .test_memory import Kit, tokens
from .test_with_store import save

Prompts = dict[str, list[int]]
Own = Callable[[list[int]], list[int]]


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    kit = Kit(tmp_path, n_blocks=64)
    yield kit
    assert kit.io.close(5.0)


def restored(kit: Kit, ids: np.ndarray, namespace: str) -> KvSequence | None:
    """What the store has for a turn of a namespace."""
    kit.io.submit(RestoreRequest(1, "s", ids, 16, len(ids), namespace=namespace))
    done = kit.answers.get(timeout=10)
    assert isinstance(done, RestoreDone)
    return done.sequence


def test_32_none_of_100_prefixes_of_one_tenant_is_reused_for_another(kit: Kit) -> None:
    rng = random.Random(32)
    tenants = ["", "acme", "bolt"]
    for number in range(100):
        theirs, others = rng.sample(tenants, 2)
        ids = tokens(rng.randint(20, 100), first=number)
        resident = kit.resident(f"s{number}", ids, namespace=theirs)
        kit.memory.keep(resident)
        kit.memory.publisher.publish_fork(resident)
        kit.settle()
        for namespace, n_rows in ((others, 0), (theirs, len(ids))):
            sequence, _ = kit.memory.rows_for("mine", ids, len(ids), namespace)
            found = restored(kit, ids, namespace)
            assert (sequence.n_rows, found.n_rows if found else 0) == (n_rows, n_rows), (number, namespace)
            sequence.release()
            if found:
                found.release()
        kit.memory.drop(f"s{number}")


def test_a_tenants_rows_are_saved_apart_and_come_back_to_it_alone(
    stored: RunningNode, store_of: Path, prompts: Prompts, own: Own, session: str
) -> None:
    prompt = own(prompts["multi"])
    first = stored.run_turn(prompt, session=f"{session}-a", namespace="acme", max_tokens=4, end_token_ids=[])
    assert first.sources == (0, 0, len(prompt))
    other = stored.run_turn(prompt, session=f"{session}-b", namespace="bolt", max_tokens=4, end_token_ids=[])
    common = stored.run_turn(prompt, session=f"{session}-c", max_tokens=4, end_token_ids=[])
    assert other.sources == common.sources == (0, 0, len(prompt))
    for end, namespace in (("a", "acme"), ("b", "bolt"), ("c", "")):
        saved = save(stored, f"{session}-{end}")
        assert (store_of.parent / names.folder_of(store_of.name, namespace) / saved.name).exists()
        assert saved.namespace == namespace
    stored.drop_all()
    again = stored.run_turn(prompt, session=f"{session}-d", namespace="acme", max_tokens=4, end_token_ids=[])
    assert again.sources[:2] in {(0, len(prompt)), (0, len(prompt) - 1)}  # the last token's logits may be known
    new = stored.run_turn(prompt, session=f"{session}-e", namespace="corp", max_tokens=4, end_token_ids=[])
    assert new.sources == (0, 0, len(prompt))
    assert first.tokens == other.tokens == common.tokens == again.tokens == new.tokens


def test_two_tenants_turns_that_run_at_once_share_nothing(
    node: RunningNode, prompts: Prompts, own: Own, session: str
) -> None:
    prompt = own(prompts["multi"])
    running = node.start_turn(prompt, session=f"{session}-a", namespace="acme", max_tokens=200, end_token_ids=[])
    answer = Answer()
    answer.take(next(running))
    other = node.run_turn(prompt, session=f"{session}-b", namespace="bolt", max_tokens=1)
    same = node.run_turn(prompt, session=f"{session}-c", namespace="acme", max_tokens=1)
    running.cancel()
    assert other.sources == (0, 0, len(prompt))
    assert same.sources[0] >= len(prompt) // 32 * 32


@pytest.mark.slow
def test_32_the_time_to_the_first_token_tells_nobody_what_another_tenant_sent(
    tmp_path: Path, smollm2_path: Path
) -> None:
    """200 pairs: B sends what A sent, and what nobody sent; with a control in which A sends it again."""
    rng = random.Random(7)

    def seconds(node: RunningNode, prompt: list[int], namespace: str) -> float:
        session = f"{namespace}-{time.monotonic_ns()}"
        began_at = time.perf_counter()
        node.run_turn(prompt, session=session, namespace=namespace, max_tokens=1)
        taken = time.perf_counter() - began_at
        if namespace == "bolt":
            node.drop(session)
        return taken

    with running_node(tmp_path / "n", smollm2_path, "--kv-memory", "512MiB", "--max-sessions", "64") as node:
        known, fresh, own_again = [], [], []
        for _ in range(200):
            sent, not_sent = ([rng.randrange(300, 40_000) for _ in range(48)] for _ in range(2))
            seconds(node, sent, "acme")
            for prompt, times in rng.sample([(sent, known), (not_sent, fresh)], 2):
                times.append(seconds(node, prompt, "bolt"))
            own_again.append(seconds(node, sent, "acme"))
    assert p_value(known, fresh) > 0.01, (statistics.mean(known), statistics.mean(fresh))
    assert p_value(own_again, fresh) < 1e-6, "the clock would not have told anything"


def p_value(left: list[float], right: list[float]) -> float:
    """Welch's t-test of equal means, two-sided; with hundreds of values t is as good as normal."""
    spread = statistics.variance(left) / len(left) + statistics.variance(right) / len(right)
    t = (statistics.mean(left) - statistics.mean(right)) / math.sqrt(spread)
    return math.erfc(abs(t) / math.sqrt(2))


class WrongRows:
    """What a forger wants a node to go on from."""

    def read_rows(self, layer: int, start: int, stop: int, k_out: np.ndarray, v_out: np.ndarray) -> None:
        k_out[:], v_out[:] = 0.5, -0.5


def forged(folder: Path, node: RunningNode, ids: list[int], seal: Seal) -> bytes:
    """A whole, well-formed segment of wrong rows, with the digests of another key or of none."""
    status = node.status()
    shape = status.geometry
    store = SnapshotStore(
        folder, status.fingerprint, KvGeometry(shape.n_layers, shape.n_kv_heads, shape.head_dim, shape.block_size),
        1 << 20, 1 << 30, 10, "forger", version=3, seal=seal,
    )  # fmt: skip
    store.reap()
    return (store.path / store.publish(np.array(ids, np.int32), WrongRows()).name).read_bytes()


def test_a_forged_segment_is_refused_and_its_rows_are_computed(
    tmp_path: Path, smollm2_path: Path, prompts: Prompts
) -> None:
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    prompt = prompts["multi"]
    flags = ("--store", str(tmp_path / "store"), "--store-key-file", str(key))
    with running_node(tmp_path / "n", smollm2_path, *flags) as node:
        ours = KeyedSeal(key.read_bytes()).key_id
        assert node.status().load.store_seal == f"keyed {ours.hex()}"
        expected = node.run_turn(prompt, session="s0", max_tokens=4, end_token_ids=[]).tokens
        node.wait_for("load.snapshots_published == 1")
        folder = tmp_path / "store" / node.status().fingerprint
        (saved,) = folder.glob("kv3_*.kv")
        n_tokens = parse_extent(saved.read_bytes(), None).n_tokens
        stranger = forged(tmp_path / "f1", node, prompt + expected[: n_tokens - len(prompt)], KeyedSeal(b"x" * 32))
        nobody = forged(tmp_path / "f2", node, prompt + expected[: n_tokens - len(prompt)], PlainSeal())
        claims_ours = stranger[:208] + ours + stranger[216:]
        for number, content in enumerate((claims_ours, stranger, nobody), start=1):
            saved.unlink(missing_ok=True)
            saved.write_bytes(content)
            node.drop_all()
            answer = node.run_turn(prompt, session=f"s{number}", max_tokens=4, end_token_ids=[])
            assert answer.sources == (0, 0, len(prompt))
            assert answer.tokens == expected
            assert [text.partition(":")[0] for text in answer.prefix.refused_snapshots] == [saved.name]
            node.wait_for(f"load.snapshots_published == {number + 1}")  # in the place of the forged one
            assert len(list((folder / "quarantine").glob(f"{saved.name}.*"))) == number
            node.drop_all()
            again = node.run_turn(prompt, session=f"s{number}", max_tokens=4, end_token_ids=[])
            assert again.sources[1] >= len(prompt) - 1
            assert again.tokens == expected
        assert (node.status().load.store_ok, node.status().load.snapshots_failed) == (True, 0)
