"""Images become the patches that the reference processor makes of them, and hostile files become one sentence."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file

from kvferry.engine.config import ImageConfig, VisionConfig
from kvferry.engine.errors import InvalidImage
from kvferry.engine.files.checkpoint_config import read_checkpoint_config
from kvferry.engine.vision import preprocess
from kvferry.engine.vision.preprocess import decode_image, prepare_image, scale, smart_resize

GOLDEN = Path(__file__).parents[2] / "golden" / "vl_preprocess"
FACTS: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())


@pytest.fixture(scope="module")
def vision(recorded: Callable[[str], Path]) -> VisionConfig:
    config = read_checkpoint_config(recorded("qwen3vlmoe_bf16") / "model").vision
    assert config is not None
    return config


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("case", FACTS["images"], ids=lambda case: case["file"])
def test_recorded_images(case: dict[str, Any], vision: VisionConfig) -> None:
    size = case["processor_size"]
    limits = ImageConfig(min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])
    vision = dataclasses.replace(vision, image=limits)
    data = (GOLDEN / case["file"]).read_bytes()
    assert np.array_equal(scale(decode_image(data), vision), np.asarray(Image.open(GOLDEN / case["resized_png"])))
    image = prepare_image(data, vision)
    assert [image.grid.frames, image.grid.rows, image.grid.cols] == case["grid_thw"]
    assert image.grid.n_tokens(vision.merge_size) == case["n_image_tokens"]
    assert image.pixel_values[0, :16].tolist() == case["patch0_first16"]
    assert image.pixel_values[5, :8].tolist() == case["patch5_first8"]
    assert image.pixel_values[-1, -8:].tolist() == case["last_patch_last8"]
    assert image.pixel_values.mean(dtype=np.float64) == pytest.approx(case["pixel_values_mean"], abs=1e-9)


@pytest.mark.parametrize("name", ["qwen3vl_tied_bf16", "qwen3vl_untied_f32", "qwen3vlmoe_bf16"])
def test_recorded_prompts(name: str, recorded: Callable[[str], Path]) -> None:
    folder = recorded(name)
    vision = read_checkpoint_config(folder / "model").vision
    assert vision is not None
    golden = load_file(folder / "golden.safetensors")
    prompts = json.loads((folder / "golden.json").read_text())["prompts"]
    for prompt, facts in prompts.items():
        if "images" in facts:
            images = [prepare_image((folder / file).read_bytes(), vision) for file in facts["images"]["files"]]
            pixels = np.concatenate([image.pixel_values for image in images])
            assert np.array_equal(pixels, golden[f"{prompt}.pixel_values"])
            assert [[1, image.grid.rows, image.grid.cols] for image in images] == facts["image_grid_thw"]


def test_the_recorded_table_of_sizes() -> None:
    table = FACTS["smart_resize_table_h_w_min_max_result"]
    assert len(table) > 100
    for height, width, min_pixels, max_pixels, result in table:
        if result == "ValueError":
            with pytest.raises(InvalidImage, match="200 times"):
                smart_resize(height, width, 32, min_pixels, max_pixels)
        else:
            assert list(smart_resize(height, width, 32, min_pixels, max_pixels)) == result


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000))
def test_sizes_are_whole_tokens_within_the_limits(height: int, width: int) -> None:
    if max(height, width) <= 200 * min(height, width):
        new_height, new_width = smart_resize(height, width, 32, 65536, 16_777_216)
        assert new_height % 32 == new_width % 32 == 0
        assert 65536 <= new_height * new_width <= 16_777_216


def test_an_image_is_turned_as_its_exif_says(vision: VisionConfig) -> None:
    upright = Image.linear_gradient("L").convert("RGB").resize((160, 96))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side: turn by 90 degrees clockwise
    lying = encode(upright.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)
    assert prepare_image(lying, vision).content_hash == prepare_image(encode(upright, "PNG"), vision).content_hash


def test_kinds_of_files_and_pixels(vision: VisionConfig) -> None:
    picture = Image.open(GOLDEN / "h_96x80_RGB.png").convert("RGB")
    plain = prepare_image(encode(picture, "PNG"), vision)
    assert prepare_image(encode(picture, "WEBP", lossless=True), vision).content_hash == plain.content_hash
    as_jpeg = prepare_image(encode(picture, "JPEG", quality=95), vision)
    assert np.abs(as_jpeg.pixel_values - plain.pixel_values).mean() < 0.1
    assert as_jpeg.content_hash != plain.content_hash
    grey = picture.convert("L")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    assert (
        prepare_image(encode(deep, "PNG"), vision).content_hash
        == prepare_image(encode(grey, "PNG"), vision).content_hash
    )
    clear = Image.new("LA", (64, 64), (0, 0))
    assert (prepare_image(encode(clear, "PNG"), vision).pixel_values == 1).all(), "what is transparent is white"
    assert decode_image(encode(picture.convert("CMYK"), "JPEG")).mode == "RGB"


def test_the_hash_is_of_what_the_tower_sees(vision: VisionConfig) -> None:
    one = Image.new("RGB", (64, 64), (10, 20, 30))
    assert (
        prepare_image(encode(one, "PNG"), vision).content_hash
        == prepare_image(encode(one, "PNG", compress_level=0), vision).content_hash
    )
    wide, high = (prepare_image(encode(Image.new("RGB", s), "PNG"), vision) for s in ((128, 32), (32, 128)))
    assert wide.content_hash != high.content_hash


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a file of the kinds PNG, JPEG, WEBP"),
        (b"GIF89a" + bytes(100), "not a file of the kinds"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a file of the kinds"),
        (encode(Image.new("RGB", (8, 8)), "BMP"), "not a file of the kinds"),
        (encode(Image.new("RGB", (99, 99)), "PNG")[:60], "damaged"),
        (encode(Image.new("1", (9000, 9000)), "PNG"), "9000 x 9000 pixels; the limits are"),
        (encode(Image.new("1", (40000, 1)), "PNG"), "40000 x 1 pixels; the limits are"),
        (encode(Image.new("L", (300, 1)), "PNG"), "200 times"),
    ],
)
def test_what_is_no_image_or_too_large_is_refused(data: bytes, reason: str, vision: VisionConfig) -> None:
    with pytest.raises(InvalidImage, match=reason):
        prepare_image(data, vision)


def test_a_file_beyond_the_limit_is_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess, "IMAGE_BYTES_MAX", 10)
    with pytest.raises(InvalidImage, match="has 11 bytes, more than the limit of 10"):
        decode_image(bytes(11))


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(["PNG", "JPEG", "WEBP"]),
    damage=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1),
)
def test_no_damage_gives_anything_but_an_image_or_a_sentence(kind: str, damage: list[tuple[int, int]]) -> None:
    data = bytearray(encode(Image.linear_gradient("L").resize((40, 30)).convert("RGB"), kind))
    for place, value in damage:
        data[place % len(data)] = value
    sentence = ""
    try:
        assert decode_image(bytes(data)).mode == "RGB"
    except InvalidImage as error:
        sentence = str(error)
    assert "\n" not in sentence
