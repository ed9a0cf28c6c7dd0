"""The command `kvferry fleet`."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvferry.fleet.bundle import ARCHITECTURES
from kvferry.terminal.words import say

if TYPE_CHECKING:
    from kvferry.engine.files.catalogue import ModelRecord
    from kvferry.fleet.bundle import Bundle

PYTHON: Final = "3.11"


@click.group()
def fleet() -> None:
    """Get ready what boards need; ansible/ brings it there."""


@fleet.command("bundle")
@click.option("--arch", type=click.Choice(ARCHITECTURES), default="aarch64", show_default=True, help="Of the boards.")
@click.option("--python", default=PYTHON, show_default=True, metavar="VERSION", help="Of the boards, such as 3.12.")
@click.option("--extras", default="s3", show_default=True, metavar="NAMES", help="Such as s3,tracing.")
@click.option("--model", "models", multiple=True, metavar="NAME", help="A fetched model to put beside it. Repeatable.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=None,
              help="Folder that keeps bundles. Default: where the playbooks look for them.")  # fmt: skip
@click.option("--refresh", is_flag=True, help="Make it again, with the newest dependencies that the index has.")
@click.option("--source", type=click.Path(path_type=Path, file_okay=False), default=None,
              help="Source tree of kvferry. Default: the one this command is run from.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bundle(
    arch: str,
    python: str,
    extras: str,
    models: tuple[str, ...],
    output: Path | None,
    refresh: bool,
    source: Path | None,
    as_json: bool,
) -> None:
    """Gather the wheels and models that boards install without a network.

    One tar holds our wheel, all that it needs for the boards' architecture and Python, pip itself, and the SHA-256 sum
    of each. It takes the wheels of an earlier bundle that needs the same. Model files are compared with the sums that
    were recorded when they were fetched.

    Example: kvferry fleet bundle --arch aarch64 --python 3.11 --model smollm2-135m
    """
    from kvferry.engine.files.catalogue import cache_root
    from kvferry.engine.files.fetch import verify_model
    from kvferry.fleet.bundle import make_bundle

    folder = output or cache_root() / "bundles"
    tree = source or Path(__file__).resolve().parents[1]
    records = [verify_model(name) for name in models]
    wanted = [extra.strip() for extra in extras.split(",") if extra.strip()]
    made = make_bundle(tree, folder, arch, python, wanted, refresh=refresh)
    gathered = [file for record in records for file in gather_model(record, folder / "models")]
    if as_json:
        say(json.dumps({**asdict(made), "models": [{"path": str(p), "sha256": s} for p, s in gathered]}, indent=2))
    else:
        _tell(made, gathered)


def gather_model(record: ModelRecord, folder: Path) -> list[tuple[Path, str]]:
    """The model's files with their sums, in ``folder``; hard links where the file system allows."""
    gathered = []
    for file_name, recorded in record.files.items():
        target = folder / record.name / file_name
        _bring(record.folder / file_name, target, recorded.sha256)
        gathered.append((target, recorded.sha256))
    return gathered


def _bring(file: Path, target: Path, sha256: str) -> None:
    """What lies there from before is taken only if it is this file."""
    from kvferry.engine.files.digest import file_sha256
    from kvferry.engine.files.publish import published

    if target.exists() and (target.samefile(file) or file_sha256(target) == sha256):
        return
    target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(file)
    except OSError:  # another file system
        with published(target) as copy, file.open("rb") as whole:
            shutil.copyfileobj(whole, copy)


def _tell(made: Bundle, gathered: list[tuple[Path, str]]) -> None:
    say(f"release  {made.release}{'' if made.made else '  (was there already)'}")
    say(f"tar      {made.tar}  {Path(made.tar).stat().st_size / 1e6:.0f} MB")
    say(f"sha256   {made.sha256}")
    for path, digest in gathered:
        say(f"model    {path}  {path.stat().st_size / 1e6:.0f} MB\n         {digest}")
    say("next     cd ansible && ansible-playbook -i inventory.yml site.yml")
