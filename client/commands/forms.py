"""The options of `kvferry chat` about tools and the form of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvferry.client.sdk import AnswerForm, Choices, JsonSchema, OutputFormat, Regex, Tool

Command = TypeVar("Command", bound=Callable[..., Any])

_FILE_BYTES_MOST: Final = 4 << 20  # a request may have 32 MiB, a format 64 KiB
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def form_options(command: Command) -> Command:
    """--tools, --call, --thinking, --schema, --regex, --choice; what they ask for is made by `form_of`."""
    for option in (
        click.option("--choice", "choices", multiple=True, help="The answer is one of these texts (repeat it)."),
        click.option("--regex", default=None, help="The answer matches this expression as a whole."),
        click.option("--schema", type=_FILE, default=None, help="The answer is JSON as the schema in FILE has it."),
        click.option("--thinking/--no-thinking", default=None, help="Think before answering, if the model can."),
        click.option("--call", is_flag=False, flag_value="", default=None, metavar="[TOOL]",
                     help="The answer is a call: of any tool, or of this one."),
        click.option("--tools", "tools_file", type=_FILE, default=None,
                     help="Functions the model may call: a JSON list of {name, description, parameters}."),
    ):  # fmt: skip
        command = option(command)
    return command


def form_of(
    *,
    tools_file: Path | None,
    call: str | None,
    thinking: bool | None,
    schema: Path | None,
    regex: str | None,
    choices: tuple[str, ...],
) -> AnswerForm:
    """What the options ask for. Raises click.UsageError."""
    formats: list[OutputFormat] = []
    if schema is not None:
        value = _json(schema)
        if not isinstance(value, dict):
            raise click.UsageError(f"{schema} holds no JSON object, so it is no schema.")
        formats.append(JsonSchema(value))
    if regex is not None:
        formats.append(Regex(regex))
    if choices:
        formats.append(Choices(choices))
    if len(formats) > 1:
        raise click.UsageError("--schema, --regex and --choice each say what the answer is; use one of them.")
    return AnswerForm(
        tools=tools_of(tools_file) if tools_file is not None else (),
        must_call=False if call is None else call or True,
        thinking=thinking,
        format=formats[0] if formats else None,
    )


def tools_of(path: Path) -> tuple[Tool, ...]:
    """The tools of a file: plain, or each as {"type": "function", "function": {...}}. Raises click.UsageError."""
    value = _json(path)
    if not isinstance(value, list) or not value:
        raise click.UsageError(f"{path} holds no JSON list of tools.")
    return tuple(_tool(path, number, entry) for number, entry in enumerate(value, start=1))


def _tool(path: Path, number: int, entry: Any) -> Tool:
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = entry["function"]
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise click.UsageError(f"Tool {number} in {path} has no name.")
    description, parameters = entry.get("description", ""), entry.get("parameters")
    if not isinstance(description, str) or not isinstance(parameters, dict | None):
        raise click.UsageError(
            f"Tool {number} in {path} has a description that is no text, or parameters that are no JSON schema."
        )
    return Tool(entry["name"], description, parameters)


def _json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_BYTES_MOST + 1)  # a device may have no end
        if len(raw) > _FILE_BYTES_MOST:
            raise click.UsageError(f"{path} has more than {_FILE_BYTES_MOST >> 20} MiB, which is the limit.")
        return json.loads(raw.decode("utf-8-sig"))
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from error
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{path} is no JSON: {error or 'it is nested too deeply'}.") from error
