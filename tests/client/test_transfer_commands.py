"""`kvferry sessions export` and `import` as a person types them, and chat's words about models, priority and time."""

from __future__ import annotations

import asyncio
import json
import os
import stat

import pytest

from kvferry.client.session_file import write_session_file
from kvferry.proto.v1 import chat_pb2
from kvferry.store.geometry import KvGeometry
from kvferry.store.memory_rows import MemoryRows
from kvferry.store.place import StorePlace
from kvferry.store.snapshot_store import SnapshotStore

from .scripted_coordinator import finished, started
from .test_cli import kvferry


async def test_a_session_goes_through_a_file(coordinator, env, tmp_path):
    file = tmp_path / "s.kvs"
    code, out, err = await kvferry("sessions", "export", "mine", str(file), **env)
    assert (code, out) == (0, f"{file}: session mine, 3 tokens, 0 files of rows\n"), err
    code, out, err = await kvferry("sessions", "import", str(file), "--name", "yours", **env)
    assert (code, out, err) == (0, "yours\n", "")
    imported = coordinator.calls[-1]
    assert (imported.session_id, imported.session.session_id) == ("yours", "mine")
    assert list(imported.session.turns[0].prompt_ids) == [1, 2]


async def test_an_exported_session_is_its_owners_and_a_link_to_it_stays(coordinator, env, tmp_path):
    (tmp_path / "link").symlink_to("s.kvs")
    code, _, err = await kvferry("sessions", "export", "mine", str(tmp_path / "link"), **env)
    assert code == 0, err
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "s.kvs").stat().st_mode) == 0o640
    os.mkfifo(tmp_path / "pipe")
    reading = asyncio.create_task(asyncio.to_thread((tmp_path / "pipe").read_bytes))
    code, _, err = await kvferry("sessions", "export", "mine", str(tmp_path / "pipe"), **env)
    assert (code, await reading) == (0, (tmp_path / "s.kvs").read_bytes()), err
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("tenant", ["", "acme"])
async def test_sealed_rows_are_exported_with_the_fleets_key(coordinator, env, tmp_path, tenant):
    key, root = tmp_path / "key", tmp_path / "store"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    geometry = KvGeometry(1, 1, 2)
    store = SnapshotStore(
        root, "feed", geometry, 1024, 1 << 30, 10, "n", version=3, seal=StorePlace("", key).seal(), tenant=tenant
    )
    store.publish([1, 2], MemoryRows.empty(geometry, 2))
    command = ("sessions", "export", "mine", str(tmp_path / "s.kvs"), "--rows", "--store", str(root))
    code, out, err = await kvferry(*command, "--store-key-file", str(key), **env)
    assert (code, out.endswith("3 tokens, 1 files of rows\n")) == (0, True), (out, err)


async def test_rows_of_another_fingerprint_are_left_out_with_a_word(coordinator, env, tmp_path):
    rows = []
    for letter in "ab":
        folder = tmp_path / "from" / (letter * 32)
        folder.mkdir(parents=True)
        rows.append(folder / f"kv3_{letter * 32}.kv")
        rows[-1].write_bytes(letter.encode() * 100)
    write_session_file(tmp_path / "s.kvs", chat_pb2.ExportedSession(session_id="s").SerializeToString(), rows)
    store = tmp_path / "to"
    store.mkdir()
    code, out, err = await kvferry(
        "sessions", "import", str(tmp_path / "s.kvs"), "--store", str(store), "--json", **env
    )
    assert code == 0, err
    assert json.loads(out) == {
        "session_id": "s", "n_row_files": 1, "rows_refused": f"no node here has the fingerprint {'a' * 32}",
    }  # fmt: skip
    assert [p.relative_to(store) for p in store.rglob("*.kv")] == [rows[1].relative_to(tmp_path / "from")]
    code, _, err = await kvferry("sessions", "import", str(tmp_path / "s.kvs"), **env)
    assert (code, err) == (0, "rows are not imported: no --store is given; they are computed anew\n")


@pytest.fixture
def with_rows(tmp_path):
    """A session's file with a row file of the model here."""
    folder = tmp_path / "from" / ("b" * 32)
    folder.mkdir(parents=True)
    (folder / f"kv3_{'b' * 32}.kv").write_bytes(b"rows")
    session = chat_pb2.ExportedSession(session_id="s").SerializeToString()
    write_session_file(tmp_path / "s.kvs", session, list(folder.iterdir()))
    return str(tmp_path / "s.kvs")


async def test_a_store_that_takes_no_rows_does_not_make_an_error_of_an_import(coordinator, env, tmp_path, with_rows):
    store = tmp_path / "to"
    store.mkdir()
    (store / ("b" * 32)).touch()  # root may write where a mode forbids it
    code, out, err = await kvferry("sessions", "import", with_rows, "--store", str(store), **env)
    assert (code, out) == (0, "s\n"), err
    assert err.startswith("rows are not imported: cannot make directory")
    assert err.endswith("; they are computed anew\n")


async def test_a_store_that_is_not_there_is_refused_before_anything_is_imported(coordinator, env, tmp_path, with_rows):
    nowhere = tmp_path / "nowhere"
    code, _, err = await kvferry("sessions", "import", with_rows, "--store", str(nowhere), **env)
    assert (code, f"there is no folder {nowhere}" in err, nowhere.exists()) == (44, True, False)
    assert not coordinator.calls
    command = ("sessions", "export", "mine", str(tmp_path / "e.kvs"), "--rows", "--store", str(nowhere))
    code, _, err = await kvferry(*command, **env)
    assert (code, f"there is no folder {nowhere}" in err) == (44, True)


async def test_names_in_a_file_lead_nowhere_else(coordinator, env, tmp_path):
    folder = tmp_path / ("b" * 32)
    folder.mkdir()
    (tmp_path / "to").mkdir()
    for name in ("evil.sh", "kv3_.kv"):
        (folder / name).write_bytes(b"x")
        session = chat_pb2.ExportedSession(session_id="s").SerializeToString()
        write_session_file(tmp_path / "s.kvs", session, [folder / name])
        code, _, err = await kvferry(
            "sessions", "import", str(tmp_path / "s.kvs"), "--store", str(tmp_path / "to"), **env
        )  # fmt: skip
        assert code != 0
        assert "error: the snapshot is refused (bad_name)" in err
    assert not list((tmp_path / "to").iterdir())
    assert not coordinator.calls, "a session is not imported and then called an error"


async def test_what_is_no_session_is_one_sentence(coordinator, env, tmp_path):
    (tmp_path / "s.kvs").write_bytes(b"a photograph")
    code, _, err = await kvferry("sessions", "import", str(tmp_path / "s.kvs"), **env)
    assert (code, err) == (1, f"error: {tmp_path / 's.kvs'} is no session that was exported.\n")
    code, _, err = await kvferry("sessions", "export", "mine", str(tmp_path / "no" / "s.kvs"), **env)
    assert (code, "cannot be written: no such file or directory" in err) == (1, True)
    code, _, err = await kvferry("sessions", "export", "mine", str(tmp_path / "s.kvs"), "--rows", **env)
    assert (code, "--rows needs --store" in err) == (2, True)


async def test_chat_names_a_model_and_gives_a_turn_its_terms(coordinator, env):
    coordinator.echo_turn_id = True
    coordinator.scripts = [[started(), finished(0)]]
    code, _, err = await kvferry("chat", "--model", "other", "--priority", "-5", "--timeout", "30", "-m", "hi", **env)
    assert code == 0, err
    created = next(c for c in coordinator.calls if isinstance(c, chat_pb2.CreateSessionRequest))
    asked = next(c for c in coordinator.calls if isinstance(c, chat_pb2.GenerateRequest))
    assert (created.model, asked.priority, asked.timeout_seconds) == ("other", -5, 30.0)
