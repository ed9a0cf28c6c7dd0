"""The models of a fleet: which one a session speaks to, and which one a node serves. Pure.

Token ids mean something under one tokenizer and chat template only, so their digest decides first; where several models
have the same one, the name does. A turn goes to nodes of its session's model alone, and once it has begun to nodes of
one fingerprint (``routing.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Self

from kvferry.coordinator.conversation import TextSide
from kvferry.coordinator.errors import InvalidSettings, ModelMismatch, UnknownModel
from kvferry.coordinator.forms import Preparation
from kvferry.coordinator.pictures import PictureReader
from kvferry.coordinator.registry import SessionRecord
from kvferry.engine.config import VisionConfig


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as turns see it."""

    text: TextSide
    # That its context holds; a node may hold less.
    context_length: int
    preparation: Preparation

    @classmethod
    def of(
        cls, text: TextSide, context_length: int, *, check_grammar: Callable[[str], None],
        vision: VisionConfig | None = None,
    ) -> Self:  # fmt: skip
        """``check_grammar`` raises for a grammar that no node could follow."""
        reader = PictureReader(vision, text.model_name)
        return cls(text, context_length, Preparation(text, check_grammar, reader))

    @property
    def name(self) -> str:
        return self.text.model_name

    @property
    def sees_images(self) -> bool:
        return self.preparation.reader.vision is not None


class Models:
    """At least one; the first is the one of sessions that name none."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        """Raises InvalidSettings when two have one name."""
        self._by_name: dict[str, ServedModel] = {}
        for model in models:
            if model.name in self._by_name:
                raise InvalidSettings(
                    f"two of the models are called {model.name}, so no session could name the one it wants: give the "
                    "folder, or general.name in the GGUF file, another name"
                )
            self._by_name[model.name] = model

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    @property
    def default(self) -> ServedModel:
        return next(iter(self))

    @property
    def names(self) -> str:
        """All of them, for a sentence."""
        return ", ".join(self._by_name)

    def named(self, name: str) -> ServedModel:
        """The default one for an empty name. Raises UnknownModel."""
        if not name:
            return self.default
        if name not in self._by_name:
            raise UnknownModel(f"there is no model {name[:140]!r} here: this coordinator serves {self.names}")
        return self._by_name[name]

    def of_session(self, session: SessionRecord) -> ServedModel:
        """Raises ModelMismatch when its tokens are none of these models'."""
        model = self.match(session.tokenizer_digest, session.model)
        if model is None:
            raise ModelMismatch(
                f"session {session.session_id} was begun with {session.model}, whose tokens mean nothing to "
                f"{self.names}: start the coordinator with the session's model, or begin a new session"
            )
        return model

    def of_node(self, node_id: str, name: str, tokenizer_digest: str) -> ServedModel:
        """Raises ModelMismatch when it serves none of these."""
        model = self.match(tokenizer_digest, name)
        if model is None:
            raise ModelMismatch(
                f"node {node_id} serves {name or 'a model without a name'}, and this coordinator {self.names}: start "
                "both with the same --model; a coordinator takes several"
            )
        return model

    def of_import(self, name: str, tokenizer_digest: str) -> ServedModel:
        """The model that a session of another cluster goes on with. Raises ModelMismatch."""
        same = [model for model in self if model.text.digest == tokenizer_digest]
        if not same:
            raise ModelMismatch(
                f"the session was begun with {name[:140] or 'a model without a name'}, whose tokens mean nothing to "
                f"{self.names}: import it where a model with the same tokenizer and chat template is served"
            )
        return next((model for model in same if model.name == name), same[0])

    def match(self, tokenizer_digest: str, name: str) -> ServedModel | None:
        """The model with this tokenizer and template; of several such, the one with this name."""
        same = [model for model in self if model.text.digest == tokenizer_digest]
        return same[0] if len(same) == 1 else next((model for model in same if model.name == name), None)
