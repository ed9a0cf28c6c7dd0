"""docs/cli.md, made of the commands themselves: ``python -m kvferry.client.reference > docs/cli.md``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Final

import click

from kvferry.client.cli import SHORT_HELP, kvferry

Words = tuple[str, ...]

_HEAD: Final = """\
# The command line

Made by `python -m kvferry.client.reference`; a test holds it to the code.

Results go to standard output; progress, notes and errors to standard error. Colours and moving bars are for terminals
only, and `NO_COLOR=1` takes the colours off; elsewhere what takes long says so in a plain line now and then.
On a terminal, control characters in what models, files and users say are shown as `\\x1b`. A file to write may be
a device, a pipe or a link, which stays; with `/dev/stdout` everything else goes to standard error.
`--json` prints one JSON document (`top` and `chat`: one a line), in which counts begin with `n_`, bytes and seconds are
named so, and the exit code is the same as without it.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | something is wrong; one sentence on standard error says what, where, and what to do |
| 2 | wrong usage: an unknown command, option or value |
| 3 | what was looked at is not well: `kv fsck`, `kv scrub`, `kv diff`; where a model is named: it is not there |
| 4-12 | where a model is named: it, or what is asked of it, cannot be used ([models.md](models.md)) |
| 10 and up | of `kv`: why a snapshot is refused ([format.md](format.md)); 20 of `drill demo`: the verdict |
| 70 | a bug of ours; the sentence names the file with the traceback (`KVFERRY_TRACEBACK=1` shows it) |
| 130 | ended by Ctrl-C |

Completion for bash, zsh and fish, also of the names of models, conversations and drills:

```
eval "$(kvferry completion bash)"      # in ~/.bashrc; zsh the same way
kvferry completion fish > ~/.config/fish/completions/kvferry.fish
```
"""


def commands(group: click.Group = kvferry, path: Words = ()) -> Iterator[tuple[Words, click.Command]]:
    """All that can be called, each with its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        elif command is not None and not command.hidden:
            yield (*path, name), command


def reference() -> str:
    """Markdown."""
    parts = [_HEAD]
    told: set[str] = set()
    for path, command in commands():
        if path[0] not in told:
            told.add(path[0])
            parts.append(f"## {path[0]}\n\n{SHORT_HELP.get(path[0], '')}\n")
        parts.append(_section(path, command))
    return "\n".join(parts)


def _section(path: Words, command: click.Command) -> str:
    context = click.Context(command, info_name=f"kvferry {' '.join(path)}", max_content_width=100, terminal_width=100)
    usage = command.get_usage(context).removeprefix("Usage: ")
    words = inspect.cleandoc(command.help or "").replace("\b\n", "").split("\f")[0]
    lines = [f"### {' '.join(path)}\n", f"```\n{usage}\n```\n", f"{words}\n"]
    if command.epilog:
        label, _, example = command.epilog.partition(": ")
        lines.append(f"{label}: `{example}`\n")
    rows = [record for parameter in command.params if (record := parameter.get_help_record(context))]
    if rows:
        lines += [
            "| option | |",
            "| --- | --- |",
            *(f"| `{_cell(left)}` | {_cell(right)} |" for left, right in rows),
            "",
        ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(reference())
