"""The command `kvferry`: a group that loads each room's commands when they run, so that no room imports another."""

from __future__ import annotations

import io
import os
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points, version
from typing import Final, TextIO

import click
from click.shell_completion import CompletionItem

ENTRY_POINT_GROUP: Final = "kvferry.commands"

SHORT_HELP: Final = {
    "up": "Start a local cluster in one command.",
    "chat": "Talk to the model; the conversation outlives nodes and coordinators.",
    "sessions": "List, show, fork and delete conversations.",
    "nodes": "Show the fleet.",
    "status": "Show the coordinator and its fleet at a glance.",
    "top": "Watch nodes and streams as they work.",
    "route": "Explain where each turn went and why, and how right the router was.",
    "models": "Fetch, list, inspect and verify models.",
    "node": "Run a node.",
    "coordinator": "Run a coordinator.",
    "gateway": "Serve the OpenAI HTTP API.",
    "config": "Show, check or begin the settings of a node, a coordinator or a gateway.",
    "certs": "Be a private certificate authority: who is who in the fleet.",
    "security": "Find out what is open to others.",
    "tokens": "Make, list and revoke API tokens of clients.",
    "kv": "List, inspect, verify, convert, repair and remove KV snapshots.",
    "score": "Compute logits and KV rows of given tokens, to compare with another implementation.",
    "doctor": "Examine this machine: what is odd, what it means, what to do.",
    "simulate": "Predict what a fleet would do, with the coordinator's own routing.",
    "storm": "Break simulated clusters in every way, thousands of times.",
    "completion": "Print what bash, zsh or fish needs to complete commands and names.",
    "drill": "Break a real cluster and judge what happened.",
    "fleet": "Get ready what boards need.",
    "bench": "Measure, as ratios against a peer in the same run.",
}
"""What `kvferry --help` prints. Kept here, since asking a command for its help imports its room."""

EXIT_INTERRUPTED: Final = 130


class LazyGroup(click.Group):
    """A group whose commands are entry points, imported when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names in the order of SHORT_HELP, then whatever other packages bring."""
        names = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
        return [name for name in SHORT_HELP if name in names] + sorted(names - SHORT_HELP.keys())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Imports the command's room."""
        point = self._entry_point(cmd_name)
        if point is None:
            return None
        command = point.load()
        if not isinstance(command, click.Command):
            raise click.ClickException(f"{point.value} is not a command; reinstall kvferry.")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggests names, which click looks for among commands that are loaded."""
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            names = self.list_commands(ctx)
            raise click.exceptions.NoSuchCommand(error.command_name, possibilities=names, ctx=ctx) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names without importing anything, and options."""
        names = [
            CompletionItem(name, help=SHORT_HELP.get(name))
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Prints the table without importing anything."""
        rows = [(name, SHORT_HELP.get(name, "")) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _entry_point(self, name: str) -> EntryPoint | None:
        return next(iter(entry_points(group=ENTRY_POINT_GROUP, name=name)), None)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(version("kvferry"), prog_name="kvferry")
def kvferry() -> None:
    """Serve one chat model on a handful of small boards; every conversation outlives the board it runs on.

    Exit codes: 0 done, 1 a sentence says what is wrong, 2 wrong usage; docs/cli.md lists the others.
    """
    from kvferry.terminal.output import colour

    click.get_current_context().color = colour()


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and exits: 0, the error class's exit code, 2 for wrong usage, 130 for Ctrl-C.

    An error of ours becomes one sentence; anything else is a bug, ends with 70, and leaves its traceback in a file.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files are bytes, and printed as they are
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters of its C++ lines reaches us as errors
    try:
        result = kvferry.main(args=arguments, prog_name="kvferry", standalone_mode=False)
        _flush_output()
    except click.exceptions.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        from kvferry.terminal.words import shown

        told = io.StringIO()
        error.show(told)
        click.echo(shown(told.getvalue(), err=True), err=True, nl=False)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        _discard(sys.stdout)
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - a person gets a sentence, whatever it is
        from kvferry.terminal.failures import EXIT_BUG, sentence_of, tell_bug
        from kvferry.terminal.words import shown

        complaint = _output_complaint(error)
        sentence, exit_code = (complaint, 1) if complaint else sentence_of(error) or (tell_bug(error), EXIT_BUG)
        try:
            click.echo(f"error: {shown(sentence, err=True)}", err=True)
        except OSError:  # stderr may be just as full
            _discard(sys.stderr)
        sys.exit(exit_code)
    sys.exit(result if isinstance(result, int) else 0)


def _flush_output() -> None:
    """Now rather than when Python ends, which would print a complaint of its own."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard(stream: TextIO | None) -> None:
    """Else Python complains about what it cannot flush when it ends."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _output_complaint(error: Exception) -> str | None:
    """A sentence if `error` came from writing to the standard output, else None."""
    if not isinstance(error, OSError) or not (_is_output_still_failing() or _came_from_printing(error)):
        return None
    _discard(sys.stdout)
    return f"cannot write to the standard output: {(error.strerror or str(error)).lower()}."


def _is_output_still_failing() -> bool:
    """What could not be written is still in the buffer, if there is one."""
    try:
        _flush_output()
    except OSError:
        return True
    return False


def _came_from_printing(error: OSError) -> bool:
    """For an output without a buffer: click and rich do all our printing."""
    modules = {frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)}
    return bool(modules & {"click.utils", "rich.console"})


if __name__ == "__main__":
    main()
