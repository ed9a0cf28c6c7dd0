"""Messages with images and tools reach the template as it expects them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.errors import InvalidMessage
from kvferry.engine.text.messages import TOOLS_CHARS_MAX, ChatMessage, template_message, template_tools
from kvferry.engine.text.model import TextModel


def test_the_recorded_conversation_with_two_images(qwen_tiny: TextModel, qwen_tiny_golden: Any) -> None:
    chat = qwen_tiny_golden["chat"]
    system, question = chat["messages"]
    texts = [part["text"] for part in question["content"] if part["type"] == "text"]
    messages = [
        ChatMessage("system", system["content"]),
        ChatMessage("user", "".join(texts), images_at=(0, len(texts[0]))),
    ]
    assert template_message(messages[1])["content"] == question["content"]
    assert qwen_tiny.render(messages, add_generation_prompt=True) == chat["rendered"]
    assert qwen_tiny.first_turn(messages) == chat["ids_before_image_expansion"]


def test_images_beside_each_other_and_at_the_end() -> None:
    content = template_message(ChatMessage("user", "ab", images_at=(0, 0, 2)))["content"]
    assert [part["type"] for part in content] == ["image", "image", "text", "image"]
    assert [part["type"] for part in template_message(ChatMessage("user", "", images_at=(0,)))["content"]] == ["image"]


@pytest.mark.parametrize("places", [(-1,), (3,), (2, 1)])
def test_images_outside_the_text_are_refused(places: tuple[int, ...]) -> None:
    with pytest.raises(InvalidMessage, match="must stand in order within 2 characters"):
        template_message(ChatMessage("user", "ab", images_at=places))


def test_tools_are_plain_values_within_limits() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    copied = template_tools([tool])
    assert copied == [tool]
    assert copied is not None
    assert copied[0]["function"] is not tool["function"]
    assert template_tools([]) is None
    with pytest.raises(InvalidMessage, match="cannot be written as JSON"):
        template_tools([{"f": object()}])
    with pytest.raises(InvalidMessage, match="more than the limit"):
        template_tools([{"f": "x" * TOOLS_CHARS_MAX}])


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_a_folder_s_template_in_any_of_its_places(place: str, qwen_tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(qwen_tiny_folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    source = "{{ messages[0].content }}!"
    if place == "chat_template.json":
        del settings["chat_template"]
        (folder / place).write_text(json.dumps({"chat_template": source}))
    elif place == "chat_template.jinja":
        (folder / place).write_text(source)
    else:
        settings["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert TextModel.load(folder).render([ChatMessage("user", "Hi")], add_generation_prompt=False) == "Hi!"
