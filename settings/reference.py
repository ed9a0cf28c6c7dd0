"""docs/configuration.md, made of the settings themselves.

``python -m kvferry.settings.reference > docs/configuration.md``
"""

from __future__ import annotations

import sys
from typing import Final

from kvferry.settings.fields import describe
from kvferry.settings.roles import flags_of, settings_of
from kvferry.settings.template import sentence

_HEAD: Final = """\
# Configuration

Made by `python -m kvferry.settings.reference`; a test holds it to the code.

Flags win over the environment, the environment over the TOML file of `--config`, that over the default. Whatever is
wrong is told at once, with the place where it was given; unknown names are refused, in the file and in the
environment. What one process would be told, where each value comes from, and a file to begin with:

```
kvferry config show node --config node.toml --kv-memory 2GiB   # what `kvferry node run` with these options would use
kvferry config check coordinator --config coordinator.toml     # everything that is wrong; exit code 1 if anything is
kvferry config init gateway > gateway.toml                     # every setting as a comment: default, unit, reason
```

In a file, a name is written with `_` (`kv_memory = "2GiB"`); sizes have a unit (KiB, MiB, GiB).
"""
ROLES: Final = ("node", "coordinator", "gateway")


def reference() -> str:
    """Markdown."""
    return "\n".join([_HEAD, *(_section(role) for role in ROLES)])


def _section(role: str) -> str:
    model, flags = settings_of(role), flags_of(role)
    lines = [
        f"## {role.capitalize()}\n",
        f"`kvferry {role} run`; in the environment `{model.model_config['env_prefix']}` and the name in capitals.\n",
        "| setting | flag | default | unit | what | why |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, field in model.model_fields.items():
        told = describe(name, field)
        default = "required" if told.is_required else f"`{_default(name, told.default)}`" if told.default else "not set"
        flag = f"`{flags[name]}`" if name in flags else "-"
        cells = (f"`{name}`", flag, default, told.unit or "-", sentence(told.what), sentence(told.why))
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _default(name: str, default: str) -> str:
    return "the host's name" if name == "node_id" else default


if __name__ == "__main__":
    sys.stdout.write(reference())
