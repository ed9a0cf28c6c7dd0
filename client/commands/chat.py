"""`kvferry chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvferry.client.commands.forms import form_of, form_options
from kvferry.client.commands.options import connect, coordinator_option, tell_outage
from kvferry.client.commands.sessions import print_sessions
from kvferry.client.commands.turn_view import JsonView, TextView, TurnView, call_text
from kvferry.client.errors import (
    ClientError,
    InvalidMessage,
    TurnFailed,
    Unavailable,
    UnknownSession,
)
from kvferry.client.sdk import (
    AnswerForm,
    Client,
    Finished,
    FinishReason,
    Image,
    Message,
    Sampling,
    Session,
    ToolCall,
    Turn,
)
from kvferry.terminal.completing import completes
from kvferry.terminal.output import json_option
from kvferry.terminal.words import say

HELP_TEXT = (
    "/new starts another session, /sessions lists them, /image FILE shows a picture with the next message, "
    "/result TEXT answers a call, /quit (or Ctrl-D) ends. Ctrl-C stops an answer."
)


@click.command(epilog="Example: kvferry chat -m 'Tell me of a ferry.' --max-tokens 100")
@coordinator_option
@click.option(
    "--session",
    "session_id",
    default=None,
    shell_complete=completes("sessions"),
    help="Go on with this session, or give a new one this name.",
)
@click.option("--tenant", default="", help="Whose session a new one is: tenants do not share what is computed.")
@click.option("--model", default=None, help="Of a new session; see kvferry status. [default: the coordinator's first]")
@click.option("--message", "-m", "texts", multiple=True, help="Say this and exit (may be repeated).")
@click.option(
    "--image", "images", multiple=True, type=click.Path(), help="Show this picture with the first message (repeatable)."
)
@click.option("--system", default=None, help="System message of a new session.")
@click.option("--max-tokens", type=click.IntRange(min=0), default=512, show_default=True, help="0: no limit.")
@click.option("--temperature", type=float, default=None, help="0 (the default) is greedy.")
@click.option("--top-k", type=int, default=None, help="Keep the K most likely tokens.")
@click.option("--top-p", type=float, default=None, help="Keep the likeliest tokens up to this probability.")
@click.option("--min-p", type=float, default=None, help="Drop tokens less likely than this part of the likeliest.")
@click.option("--repetition-penalty", type=float, default=None, help="Above 1: repeat less.")
@click.option("--seed", type=int, default=None, help="Same seed, same answer.")
@click.option("--stop", multiple=True, help="End the answer before this text (may be repeated).")
@click.option("--priority", type=click.IntRange(-100, 100), default=0, help="Higher goes first. [default: 0]")
@click.option("--timeout", type=click.FloatRange(min=0), default=0.0, help="End each answer after so many seconds.")
@click.option(
    "--patience",
    type=click.FloatRange(0, 86_400),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the coordinator.",
)
@form_options
@json_option
def chat(
    coordinator: str,
    session_id: str | None,
    tenant: str,
    model: str | None,
    texts: tuple[str, ...],
    images: tuple[str, ...],
    system: str | None,
    max_tokens: int,
    stop: tuple[str, ...],
    priority: int,
    timeout: float,
    patience: float,
    as_json: bool,
    tools_file: Path | None,
    call: str | None,
    thinking: bool | None,
    schema: Path | None,
    regex: str | None,
    choices: tuple[str, ...],
    **sampling: Any,
) -> None:
    """Talk to the model. Each line is a message; the conversation goes on when its node or the coordinator dies."""
    view: TurnView = JsonView() if as_json else TextView(patience)
    if not texts and sys.stdin is None:
        raise click.UsageError("The standard input is closed, so there is nothing to say; use --message TEXT.")
    interactive = not texts and sys.stdin.isatty()
    pictures = [Image.read(path) for path in images]
    form = form_of(tools_file=tools_file, call=call, thinking=thinking, schema=schema, regex=regex, choices=choices)
    with connect(coordinator, patience, tell_outage) as client:
        conversation = Conversation(
            client,
            view,
            tenant=tenant,
            model=model,
            system=system,
            max_tokens=max_tokens,
            stop=stop,
            priority=priority,
            timeout_s=timeout,
            sampling=Sampling(**sampling),
            form=form,
            interactive=interactive,
        )
        conversation.show(pictures)
        conversation.open(session_id)
        if texts:
            for text in texts:
                conversation.say(text)
        elif interactive:
            conversation.talk(_typed_lines())
        else:
            conversation.talk(_piped_lines(sys.stdin.buffer))


class Conversation:
    """One session at a time, and what a line of the person does to it."""

    def __init__(
        self,
        client: Client,
        view: TurnView,
        *,
        tenant: str,
        model: str | None,
        system: str | None,
        max_tokens: int,
        stop: tuple[str, ...],
        priority: int,
        timeout_s: float,
        sampling: Sampling,
        form: AnswerForm,
        interactive: bool,
    ) -> None:
        self._interactive = interactive
        self._client = client
        self._view = view
        self._tenant = tenant
        self._model = model
        self._system = system
        self._max_tokens = max_tokens
        self._stop = stop
        self._priority = priority
        self._timeout_s = timeout_s
        self._sampling = sampling
        self._form = form
        self._calls: list[ToolCall] = []  # of the last answer, without a result yet
        self._results: list[Message] = []
        self._session: Session | None = None
        self._wanted_id: str | None = None
        self._images: list[Image] = []
        self._is_new = True

    def open(self, session_id: str | None) -> None:
        """Takes up a session that exists, finishing an answer it is in the middle of.

        A new one is made with its first message: nobody who says nothing, or is refused, leaves an empty one behind.
        """
        self._is_new = True
        self._session = None
        self._wanted_id = session_id
        if session_id is None:
            if self._interactive:
                self._client.list_sessions(limit=1)  # whether anybody is there is better known before typing
            return
        session = self._client.session(session_id)
        try:
            details = session.details()
        except UnknownSession:
            return
        if self._tenant not in {"", details.session.tenant}:
            raise click.UsageError(f"Session {session_id} is not one of tenant {self._tenant}: begin another one.")
        self._session = session
        self._is_new = not details.turns
        self._view.note(f"session {session_id} goes on after {len(details.turns)} turns")
        if details.session.open_turn_id:
            self._view.note("its last answer was not finished yet:")
            self._show(session, session.resume(details.session.open_turn_id))

    def show(self, images: Iterable[Image]) -> None:
        """Show these with the next message."""
        self._images += images

    def talk(self, lines: Iterator[str]) -> None:
        """Until the lines end or /quit. A person whom something is refused may try another; a script ends there."""
        if self._interactive:
            self._view.note(HELP_TEXT)
        for line in lines:
            if not line.strip():
                continue
            try:
                if not self._obey(line.strip()):
                    return
            except ClientError as error:
                if not self._interactive:
                    raise
                self._view.note(f"error: {error}")

    def say(self, text: str) -> None:
        """One turn."""
        images, self._images = self._images, []  # if they are why it is refused, the next message shall not be
        self._ask([Message("user", text, tuple(images))])

    def give_result(self, text: str) -> None:
        """What a call of the last answer came to, in their order; the model goes on when it has them all."""
        if not self._calls:
            self._view.note("the last answer called no tool")
            return
        call = self._calls.pop(0)
        self._results.append(Message("tool", text, tool_call_id=call.id))
        if self._calls:
            self._view.note(f"and {call_text(self._calls[0])}?")
        else:
            results, self._results = self._results, []
            self._ask(results)

    def _ask(self, messages: list[Message]) -> None:
        if self._is_new and self._system:
            messages.insert(0, Message("system", self._system))
        session = self._session
        is_ours = session is None  # then it goes again if its first turn is refused
        if session is None:
            self._generate(self._client.session(""), messages)  # what no message can carry is refused before anything
            session = self._client.create_session(self._wanted_id, model=self._model, tenant=self._tenant)
            self._view.note(f"session {session.id}")
        try:
            self._show(session, self._generate(session, messages))
        except Unavailable:
            self._session = session  # it may have begun, and goes on when the coordinator is back
            raise
        except TurnFailed:
            self._session, self._is_new = session, False
            raise
        except ClientError:
            if is_ours:
                with suppress(ClientError):
                    session.delete()
            raise
        self._session, self._is_new = session, False

    def _generate(self, session: Session, messages: list[Message]) -> Turn:
        form = self._form if self._is_new else replace(self._form, tools=())  # told once, with the first turn
        return session.generate(
            messages, sampling=self._sampling, max_tokens=self._max_tokens, stop=self._stop, form=form,
            priority=self._priority, timeout_s=self._timeout_s,
        )  # fmt: skip

    def _obey(self, line: str) -> bool:
        match line:
            case "/quit" | "/exit":
                return False
            case "/new":
                self.open(None)
            case "/sessions":
                print_sessions(self._client.list_sessions(limit=20))
            case _ if line.split(maxsplit=1)[0] == "/image":
                self._attach(line.removeprefix("/image").strip())
            case _ if line.startswith("/result"):
                self.give_result(line.removeprefix("/result").strip())
            case "/help":
                self._view.note(HELP_TEXT)
            case _ if line.startswith("/"):
                self._view.note(f"there is no command {line.split(maxsplit=1)[0]}. {HELP_TEXT}")
            case _:
                self.say(line)
        return True

    def _attach(self, path: str) -> None:
        if not path:
            self._view.note("which one? /image FILE")
            return
        self.show([Image.read(path)])
        self._view.note(f"{path} goes with your next message")

    def _show(self, session: Session, turn: Turn) -> None:
        try:
            finished = self._follow(turn)
        except KeyboardInterrupt:
            self._view.note("stopping this answer")
            turn.cancel()
            finished = self._follow(session.resume(turn.turn_id, from_index=turn.next_index))
            if not self._interactive:
                raise
        self._calls = list(finished.answer.tool_calls) if finished.answer else []
        self._results.clear()
        if finished.reason is FinishReason.ERROR:
            raise TurnFailed(finished.error or "the turn failed", turn_code=finished.error_code)

    def _follow(self, turn: Turn) -> Finished:
        with turn:
            for event in turn:
                self._view.show(event)
                if isinstance(event, Finished):
                    return event
        raise AssertionError("a stream ends with Finished or raises")


def _piped_lines(raw: Iterable[bytes]) -> Iterator[str]:
    """UTF-8, whatever the locale says. Raises InvalidMessage, which names the line."""
    for number, line in enumerate(raw, start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            where = f"byte {error.start + 1} is 0x{line[error.start]:02x}"
            raise InvalidMessage(f"Line {number} of the standard input is not UTF-8: {where}.") from None
        yield text.rstrip("\r\n")


def _typed_lines() -> Iterator[str]:
    import readline  # noqa: F401 - gives input() editing and history; only a terminal needs it

    while True:
        try:
            line = input("> ")
        except EOFError:
            say()
            return
        except UnicodeDecodeError:
            say("That was not UTF-8; say it again.", err=True)
            continue
        yield line
