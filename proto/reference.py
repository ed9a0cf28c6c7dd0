"""Writes docs/reference/grpc.md from the .proto files and their comments; with --check only says if it is up to date.

Usage: python -m kvferry.proto.reference [--check]     (needs the `dev` extra)
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from google.protobuf import descriptor_pb2

from kvferry.proto.generate import IMPORT_ROOT

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference" / "grpc.md"
FILES: Final = ("chat", "common", "fleet", "worker")
HEAD: Final = """# The gRPC contract

Package `kvferry.v1`, made from the files of `proto/v1` with the comments that stand there. Fields are only ever added,
so programs of one release work with the next and the one before. What the methods are for is told in
[The gRPC service and the Python SDK](../api.md).
"""
SCALARS: Final = {
    number: name.removeprefix("TYPE_").lower() for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()
}
# Numbers of fields in descriptor.proto, of which the paths to a comment are made.
MESSAGES, ENUMS, SERVICES = 4, 5, 6
FIELDS, NESTED, VALUES, METHODS = 2, 3, 2, 2

Field = descriptor_pb2.FieldDescriptorProto


class Page:
    """The Markdown of one .proto file."""

    def __init__(self, file: descriptor_pb2.FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(place.path): " ".join(place.leading_comments.split()) for place in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        """Services first, then what they speak in."""
        yield f"\n## {self._file.name.removeprefix('kvferry/proto/')}"
        for number, service in enumerate(self._file.service):
            yield from self._service(service, (SERVICES, number))
        for number, message in enumerate(self._file.message_type):
            yield from self._message(message, (MESSAGES, number), message.name)
        for number, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (ENUMS, number))

    def _service(self, service: descriptor_pb2.ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield from self._titled(service.name, path)
        yield from ("| method | takes | gives | |", "| --- | --- | --- | --- |")
        for number, method in enumerate(service.method):
            takes = ("stream of " if method.client_streaming else "") + _linked(method.input_type)
            gives = ("stream of " if method.server_streaming else "") + _linked(method.output_type)
            yield f"| `{method.name}` | {takes} | {gives} | {self._comment((*path, METHODS, number))} |"

    def _message(self, message: descriptor_pb2.DescriptorProto, path: tuple[int, ...], full_name: str) -> Iterator[str]:
        maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
        yield from self._titled(full_name, path)
        if not message.field:
            yield "It has no fields."
        else:
            yield from ("| field | type | |", "| --- | --- | --- |")
        for number, field in enumerate(message.field):
            about = [self._comment((*path, FIELDS, number))]
            if field.HasField("oneof_index") and not field.proto3_optional:
                about.append(f"One of `{message.oneof_decl[field.oneof_index].name}`.")
            yield f"| `{field.name}` | {_type_of(field, maps)} | {' '.join(filter(None, about))} |"
        for number, nested in enumerate(message.nested_type):
            if nested.name not in maps:
                yield from self._message(nested, (*path, NESTED, number), f"{full_name}.{nested.name}")

    def _enum(self, enum: descriptor_pb2.EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield from self._titled(enum.name, path)
        yield from ("| value | number | |", "| --- | --- | --- |")
        for number, value in enumerate(enum.value):
            yield f"| `{value.name}` | {value.number} | {self._comment((*path, VALUES, number))} |"

    def _titled(self, name: str, path: tuple[int, ...]) -> Iterator[str]:
        yield f"\n### {name}\n"
        if comment := self._comment(path):
            yield f"{comment}\n"

    def _comment(self, path: tuple[int, ...]) -> str:
        return self._comments.get(path, "").replace("|", "\\|").replace("<", "&lt;")


def _type_of(field: Field, maps: dict[str, descriptor_pb2.DescriptorProto]) -> str:
    if entry := maps.get(field.type_name.rsplit(".", 1)[-1]):
        return f"map of {_plain_type(entry.field[0])} to {_plain_type(entry.field[1])}"
    label = "repeated " if field.label == Field.LABEL_REPEATED else "optional " if field.proto3_optional else ""
    return label + _plain_type(field)


def _plain_type(field: Field) -> str:
    return _linked(field.type_name) if field.type_name else SCALARS[field.type]


def _linked(type_name: str) -> str:
    """A link to the type's own section on the same page."""
    name = type_name.removeprefix(".kvferry.v1.")
    return f"[{name}](#{name.replace('.', '').lower()})"


def described(names: Sequence[str] = FILES) -> list[descriptor_pb2.FileDescriptorProto]:
    """The .proto files with their comments.

    Raises:
        RuntimeError: when protoc refuses a file (it has printed why).
    """
    from grpc_tools import protoc

    sources = [f"kvferry/proto/v1/{name}.proto" for name in names]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "descriptors"
        status = protoc.main(
            ["protoc", f"-I{IMPORT_ROOT}", f"--descriptor_set_out={output}", "--include_source_info", *sources]
        )
        if status != 0:
            raise RuntimeError(f"protoc ended with status {status}")
        found = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    return sorted(found.file, key=lambda file: sources.index(file.name))


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(line for file in described() for line in Page(file).lines()) + "\n"


def main() -> int:
    """Command line entry; the exit status is 1 when --check finds a difference."""
    if "--check" not in sys.argv[1:]:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page())
        return 0
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    print("error: docs/reference/grpc.md is stale; run `make proto`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
