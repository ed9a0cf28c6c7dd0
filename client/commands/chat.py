"""`kvferry chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from kvferry.client.commands.options import coordinator_option, json_option
from kvferry.client.commands.sessions import print_sessions
from kvferry.client.commands.turn_view import JsonView, TextView, TurnView
from kvferry.client.errors import BadRequest, SessionBusy, SessionExists, TurnFailed
from kvferry.client.sdk import Client, Finished, FinishReason, Message, Sampling, Session, Turn

HELP_TEXT = "/new starts another session, /sessions lists them, /quit (or Ctrl-D) ends. Ctrl-C stops an answer."


@click.command()
@coordinator_option
@click.option("--session", "session_id", default=None, help="Go on with this session, or give a new one this name.")
@click.option("--message", "-m", "texts", multiple=True, help="Say this and exit (may be repeated).")
@click.option("--system", default=None, help="System message of a new session.")
@click.option("--max-tokens", type=click.IntRange(min=0), default=512, show_default=True, help="0: no limit.")
@click.option("--temperature", type=float, default=None, help="0 (the default) is greedy.")
@click.option("--top-k", type=int, default=None, help="Keep the K most likely tokens.")
@click.option("--top-p", type=float, default=None, help="Keep the likeliest tokens up to this probability.")
@click.option("--min-p", type=float, default=None, help="Drop tokens less likely than this part of the likeliest.")
@click.option("--repetition-penalty", type=float, default=None, help="Above 1: repeat less.")
@click.option("--seed", type=int, default=None, help="Same seed, same answer.")
@click.option("--stop", multiple=True, help="End the answer before this text (may be repeated).")
@click.option("--patience", type=float, default=60.0, show_default=True, help="Seconds to wait for the coordinator.")
@json_option
def chat(
    coordinator: str,
    session_id: str | None,
    texts: tuple[str, ...],
    system: str | None,
    max_tokens: int,
    stop: tuple[str, ...],
    patience: float,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Talk to the model. Each line is a message; the conversation goes on when its node or the coordinator dies."""
    view: TurnView = JsonView() if as_json else TextView()
    interactive = not texts and sys.stdin.isatty()
    with Client(coordinator, patience_s=patience) as client:
        conversation = Conversation(
            client,
            view,
            system=system,
            max_tokens=max_tokens,
            stop=stop,
            sampling=Sampling(**sampling),
            interactive=interactive,
        )
        conversation.open(session_id)
        if texts:
            for text in texts:
                conversation.say(text)
        elif interactive:
            conversation.talk(_typed_lines())
        else:
            conversation.talk(line.rstrip("\n") for line in sys.stdin)


class Conversation:
    """One session at a time, and what a line of the person does to it."""

    def __init__(
        self,
        client: Client,
        view: TurnView,
        *,
        system: str | None,
        max_tokens: int,
        stop: tuple[str, ...],
        sampling: Sampling,
        interactive: bool,
    ) -> None:
        self._interactive = interactive
        self._client = client
        self._view = view
        self._system = system
        self._max_tokens = max_tokens
        self._stop = stop
        self._sampling = sampling
        self._session: Session | None = None
        self._is_new = True

    def open(self, session_id: str | None) -> None:
        """Takes up a session that exists (finishing an answer it is in the middle of), or makes it."""
        self._is_new = True
        try:
            self._session = self._client.create_session(session_id)
        except SessionExists:
            if session_id is None:
                raise
            self._session = self._client.session(session_id)
            details = self._session.details()
            self._is_new = not details.turns
            self._view.note(f"session {session_id} goes on after {len(details.turns)} turns")
            if details.session.open_turn_id:
                self._view.note("its last answer was not finished yet:")
                self._show(self._session, self._session.resume(details.session.open_turn_id))
            return
        self._view.note(f"session {self._session.id}")

    def talk(self, lines: Iterator[str]) -> None:
        """Until the lines end or /quit. A person whose message is refused may try another; a script ends there."""
        if self._interactive:
            self._view.note(HELP_TEXT)
        for line in lines:
            if not line.strip():
                continue
            try:
                if not self._obey(line.strip()):
                    return
            except (BadRequest, SessionBusy, TurnFailed) as error:
                if not self._interactive:
                    raise
                self._view.note(f"error: {error}")

    def say(self, text: str) -> None:
        """One turn."""
        assert self._session is not None  # noqa: S101 - for mypy; open() came first
        messages = [Message("user", text)]
        if self._is_new and self._system:
            messages.insert(0, Message("system", self._system))
        turn = self._session.generate(messages, sampling=self._sampling, max_tokens=self._max_tokens, stop=self._stop)
        self._show(self._session, turn)
        self._is_new = False

    def _obey(self, line: str) -> bool:
        match line:
            case "/quit" | "/exit":
                return False
            case "/new":
                self.open(None)
            case "/sessions":
                print_sessions(self._client.list_sessions(limit=20))
            case "/help":
                self._view.note(HELP_TEXT)
            case _ if line.startswith("/"):
                self._view.note(f"there is no command {line.split(maxsplit=1)[0]}. {HELP_TEXT}")
            case _:
                self.say(line)
        return True

    def _show(self, session: Session, turn: Turn) -> None:
        try:
            finished = self._follow(turn)
        except KeyboardInterrupt:
            self._view.note("stopping this answer")
            turn.cancel()
            finished = self._follow(session.resume(turn.turn_id, from_index=turn.next_index))
            if not self._interactive:
                raise
        if finished.reason is FinishReason.ERROR:
            raise TurnFailed(finished.error or "the turn failed", turn_code=finished.error_code)

    def _follow(self, turn: Turn) -> Finished:
        with turn:
            for event in turn:
                self._view.show(event)
                if isinstance(event, Finished):
                    return event
        raise AssertionError("a stream ends with Finished or raises")


def _typed_lines() -> Iterator[str]:
    import readline  # noqa: F401 - gives input() editing and history; only a terminal needs it

    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo()
            return
