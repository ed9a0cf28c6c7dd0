"""What a coordinator reads of a model's files: its text side, how much its context holds, how it looks at images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from kvferry.coordinator.config import IMAGE_TOKENS
from kvferry.coordinator.models import Models, ServedModel
from kvferry.engine.config import VisionConfig
from kvferry.engine.files.open_model import open_model
from kvferry.engine.files.resolve import resolve_model
from kvferry.engine.text.grammar import Grammars
from kvferry.engine.text.model import TextModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """No weights are read."""

    text: TextModel
    context_length: int
    # How it looks at images, or None.
    vision: VisionConfig | None = None

    @classmethod
    def load(cls, name_or_path: str, image_tokens: int = IMAGE_TOKENS) -> LoadedModel:
        """Raises what ``resolve_model``, ``open_model`` and ``TextModel.load`` raise: each one sentence.

        ``image_tokens``: that one image may take at most; larger ones are scaled down further.
        """
        path = resolve_model(name_or_path)
        config = open_model(path).config
        vision = None if config.vision is None else at_most(config.vision, image_tokens)
        return cls(text=TextModel.load(path), context_length=config.context_length, vision=vision)


def load_all(names_or_paths: Sequence[str], image_tokens: int) -> list[LoadedModel]:
    """In this order."""
    return [LoadedModel.load(name_or_path, image_tokens) for name_or_path in names_or_paths]


def served(models: Iterable[LoadedModel]) -> Models:
    """The same as turns see them. Raises InvalidSettings when two have one name."""
    return Models(
        ServedModel.of(m.text, m.context_length, check_grammar=Grammars(m.text).check, vision=m.vision) for m in models
    )


def at_most(vision: VisionConfig, image_tokens: int) -> VisionConfig:
    """The same with smaller images, if the model's own limit is larger."""
    n_pixels = image_tokens * (vision.patch_size * vision.merge_size) ** 2
    image = vision.image
    image = dataclasses.replace(
        image, max_pixels=min(image.max_pixels, n_pixels), min_pixels=min(image.min_pixels, n_pixels)
    )
    return dataclasses.replace(vision, image=image)
