"""The client's own proof that a stream is whole: pure, so that every way to break it is a table test."""

from __future__ import annotations

from kvferry.client.errors import BrokenSequence
from kvferry.client.sdk.events import Finished, NodeLost, Placed, Started, Token
from kvferry.client.sdk.wire import ServerEvent


class TurnTracker:
    """Follows one turn over any number of connections.

    `accept` says whether an event is news: after a reconnect the coordinator repeats how the turn began, and that must
    not reach the program twice. Tokens are never repeated: the client names the first index it wants, so a token it
    has already is a broken promise, not a replay.
    """

    def __init__(self, turn_id: str, first_index: int = 0) -> None:
        self.turn_id = turn_id  # empty until the first event when the caller asked for the session's latest turn
        self.next_index = first_index
        self.started = False
        self.finished = False
        self._seen: set[Started | Placed | NodeLost] = set()

    def accept(self, event: ServerEvent) -> bool:
        """True for news, False for a repetition; raises BrokenSequence."""
        match event:
            case Token():
                self._accept_token(event)
                return True
            case Finished():
                self._accept_finish(event)
                return True
            case _:
                self.started = True
                is_news = event not in self._seen
                self._seen.add(event)
                return is_news

    def check_turn(self, turn_id: str) -> None:
        """Raises BrokenSequence when an event belongs to another turn."""
        self.turn_id = self.turn_id or turn_id
        if turn_id != self.turn_id:
            raise BrokenSequence(
                f"an event of turn {turn_id} came in the stream of turn {self.turn_id}",
                expected=self.next_index,
                received=self.next_index,
            )

    def _accept_token(self, token: Token) -> None:
        if token.sequence != self.next_index:
            what = "came twice" if token.sequence < self.next_index else "is missing"
            which = min(token.sequence, self.next_index)
            raise BrokenSequence(
                f"token {which} of turn {self.turn_id} {what}: {self.next_index} was due, {token.sequence} came",
                expected=self.next_index,
                received=token.sequence,
            )
        self.next_index += 1

    def _accept_finish(self, finish: Finished) -> None:
        if finish.n_answer_tokens != self.next_index:
            raise BrokenSequence(
                f"turn {self.turn_id} ended after {finish.n_answer_tokens} tokens, but {self.next_index} came",
                expected=self.next_index,
                received=finish.n_answer_tokens,
            )
        self.finished = True
