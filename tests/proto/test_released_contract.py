"""Promise 30, the wire: what the last release says is understood, and what it is told that is new, it passes on.

`released/*.binpb` is the contract of the last release as `buf build` describes it; `released/README.md` says how to
bring it up to date.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from kvferry.proto.v1 import chat_pb2, common_pb2, fleet_pb2, worker_pb2

ROOT: Final = Path(__file__).parents[2]
(RELEASED,) = (Path(__file__).parent / "released").glob("*.binpb")
BUF: Final = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
N_MESSAGES: Final = 20  # of each kind, each way
DEPTH: Final = 3


def _released_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes()).file:
        pool.Add(file)  # type: ignore[no-untyped-call]
    return pool


POOL: Final = _released_pool()


NOW: Final = {
    found.full_name: found
    for file in (chat_pb2, common_pb2, fleet_pb2, worker_pb2)
    for found in file.DESCRIPTOR.message_types_by_name.values()
}


def released(name: str) -> Descriptor | None:
    """As the last release knows it; None when it does not."""
    try:
        return POOL.FindMessageTypeByName(name)
    except KeyError:
        return None


IN_BOTH: Final = sorted(name for name in NOW if released(name) is not None)


def filled(descriptor: Descriptor, rng: random.Random, depth: int = DEPTH) -> Message:
    """A message with something in every field that there is room for; of each oneof in one."""
    message = message_factory.GetMessageClass(descriptor)()
    fields = [field for field in descriptor.fields if field.containing_oneof is None]
    fields += [rng.choice(oneof.fields) for oneof in descriptor.oneofs]
    for field in fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            if value.message_type is None:
                getattr(message, field.name)[scalar(key, rng)] = scalar(value, rng)
        elif field.message_type is not None:
            if depth:
                parts = [filled(field.message_type, rng, depth - 1) for _ in range(2 if field.is_repeated else 1)]
                getattr(message, field.name).extend(parts) if field.is_repeated else getattr(
                    message, field.name
                ).CopyFrom(parts[0])
        elif field.is_repeated:
            getattr(message, field.name).extend(scalar(field, rng) for _ in range(2))
        else:
            setattr(message, field.name, scalar(field, rng))
    return message


def scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    """Never the default, which would not travel."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_STRING:
            return f"text {rng.randrange(10**6)}" if field.type == FieldDescriptor.TYPE_STRING else rng.randbytes(5)
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice(field.enum_type.values[1:]).number
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.randrange(1, 1000) / 8
        case _:
            return rng.randrange(1, 2**31)


@pytest.mark.parametrize("name", IN_BOTH)
def test_what_the_last_release_says_is_understood_and_comes_back_whole(name: str) -> None:
    old = released(name)
    assert old is not None
    for seed in range(N_MESSAGES):
        said = filled(old, random.Random(seed))
        heard = message_factory.GetMessageClass(NOW[name]).FromString(said.SerializeToString(deterministic=True))
        assert not list(unknown_fields(heard))
        assert message_factory.GetMessageClass(old).FromString(heard.SerializeToString()) == said


@pytest.mark.parametrize("name", IN_BOTH)
def test_what_the_last_release_does_not_know_it_passes_on(name: str) -> None:
    old = released(name)
    assert old is not None
    for seed in range(N_MESSAGES):
        said = filled(NOW[name], random.Random(seed))
        passed_on = message_factory.GetMessageClass(old).FromString(said.SerializeToString(deterministic=True))
        assert message_factory.GetMessageClass(NOW[name]).FromString(passed_on.SerializeToString()) == said


def unknown_fields(message: Message) -> Iterator[int]:
    """Their numbers, at any depth."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    yield from (field.field_number for field in UnknownFieldSet(message))  # type: ignore[no-untyped-call]
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else [value]:
                yield from unknown_fields(part)


def test_every_message_and_method_of_the_last_release_is_still_there() -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes()).file
    ours = [file for file in files if file.package == "kvferry.v1"]
    assert {f"kvferry.v1.{message.name}" for file in ours for message in file.message_type} <= set(NOW)
    for file in ours:
        for service in file.service:
            now = {**chat_pb2.DESCRIPTOR.services_by_name, **fleet_pb2.DESCRIPTOR.services_by_name,
                   **worker_pb2.DESCRIPTOR.services_by_name}[service.name]  # fmt: skip
            for method in service.method:
                assert now.methods_by_name[method.name].input_type.full_name == method.input_type.removeprefix(".")
                assert now.methods_by_name[method.name].output_type.full_name == method.output_type.removeprefix(".")


def breaks(folder: Path) -> str:
    """What `make lint` would say about a tree's contract."""
    assert BUF is not None
    done = subprocess.run(
        [BUF, "breaking", "--against", RELEASED], cwd=folder, capture_output=True, text=True, check=False
    )
    assert bool(done.returncode) == bool(done.stdout), done.stderr
    return done.stdout


@pytest.mark.skipif(BUF is None, reason="buf is not installed (pip install buf-bin)")
@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        pytest.param("worker", "rpc Drain(DrainRequest) returns (DrainResponse);", "", id="a method is gone"),
        pytest.param("worker", "double timeout_seconds = 1;", "", id="a field is gone"),
        pytest.param("worker", "double timeout_seconds = 1;", "string timeout_seconds = 1;", id="another type"),
        pytest.param("worker", "double timeout_seconds = 1;", "double timeout_seconds = 9;", id="another number"),
    ],
)
def test_lint_finds_what_would_break_the_last_release(tmp_path: Path, file: str, before: str, after: str) -> None:
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    protos = tmp_path / "src/kvferry/proto"
    shutil.copytree(ROOT / "proto", protos, ignore=shutil.ignore_patterns("*.py*", "__pycache__"))
    assert breaks(tmp_path) == ""
    path = protos / f"v1/{file}.proto"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    assert f"v1/{file}.proto" in breaks(tmp_path)
