"""From an image file to the patches a vision tower reads; equal to the reference processor's, to the bit.

After Qwen2-VL's image processor: scaled (bicubic, in 8 bits) to sides that are multiples of patch x merge size and to a
number of pixels within limits, then normalised and cut. A file is a stranger's: its format, bytes and pixels are
limited before anything is decoded.
"""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from kvferry.engine.config import VisionConfig
from kvferry.engine.errors import InvalidImage
from kvferry.engine.vision.positions import Grid, patch_places

IMAGE_BYTES_MAX: Final = 20 << 20  # a photograph of 50 megapixels takes some 15 MB
PIXELS_MAX: Final = 64_000_000  # decoded, they take 256 MB for a moment
SIDE_MAX: Final = 1 << 15
ASPECT_MAX: Final = 200  # as the reference processor has it
FORMATS: Final = ("PNG", "JPEG", "WEBP")


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image, ready for the tower. ``pixel_values`` float32 [patches, elements]; an element is (channel, frame, row,
    column) of its patch. ``content_hash``: SHA-256 in hex of the scaled pixels, equal for what the tower sees as equal.
    """

    pixel_values: NDArray[np.float32]
    grid: Grid
    content_hash: str


def prepare_image(data: bytes, vision: VisionConfig) -> PreparedImage:
    """Decode, scale, normalise and cut a PNG, JPEG or WebP file. Raises InvalidImage."""
    return prepare_pixels(scale(decode_image(data), vision), vision)


def prepare_pixels(pixels: NDArray[np.uint8], vision: VisionConfig) -> PreparedImage:
    """Normalise and cut scaled pixels, uint8 [height, width, 3]."""
    grid = grid_of(pixels, vision)
    return PreparedImage(_patches(pixels, grid, vision), grid, content_hash(pixels).hex())


def grid_of(pixels: NDArray[np.uint8], vision: VisionConfig) -> Grid:
    """The patches of scaled pixels, uint8 [height, width, 3]."""
    return Grid(1, pixels.shape[0] // vision.patch_size, pixels.shape[1] // vision.patch_size)


def content_hash(pixels: NDArray[np.uint8]) -> bytes:
    """SHA-256 of scaled pixels, uint8 [height, width, 3], and of their shape: what the tower sees."""
    return hashlib.sha256(b"%d %d\n" % pixels.shape[:2] + pixels.tobytes()).digest()


def pack_pixels(pixels: NDArray[np.uint8]) -> bytes:
    """Scaled pixels as a PNG file, some half of their size: whoever unpacks it has the same pixels, wherever it runs.

    A JPEG would be smaller, and its decoders differ in the last bit.
    """
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def unpack_pixels(data: bytes, grid: Grid, content: bytes, vision: VisionConfig) -> NDArray[np.uint8]:
    """uint8 [height, width, 3] out of ``pack_pixels``; InvalidImage when they are not of this grid and content."""
    expected = (grid.cols * vision.patch_size, grid.rows * vision.patch_size)
    pixels = None
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if image.size == expected and image.mode == "RGB":  # as the header says, before anything is decoded
                pixels = np.array(image)
    except Exception as error:  # damaged files raise whatever a decoder met
        raise InvalidImage(f"the pixels of an image are no PNG file: {error}") from error
    if pixels is None or content_hash(pixels) != content:
        raise InvalidImage("the pixels of an image are not those that its grid and hash name")
    return pixels


def decode_image(data: bytes) -> Image.Image:
    """An RGB image as a viewer would show it: turned as its EXIF says, on white where it is transparent.

    Of an animation the first frame. Raises InvalidImage.
    """
    if len(data) > IMAGE_BYTES_MAX:
        raise InvalidImage(f"the image file has {len(data)} bytes, more than the limit of {IMAGE_BYTES_MAX}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata is no reason to refuse, and no message for anybody
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_size(image.width, image.height)
            image.load()
            return _on_white(_in_8_bits(ImageOps.exif_transpose(image)))
    except Image.DecompressionBombError as error:  # Pillow's own limit, several times ours
        raise InvalidImage(f"the image has more than the limit of {PIXELS_MAX} pixels") from error
    except UnidentifiedImageError as error:
        raise InvalidImage(f"the image is not a file of the kinds {', '.join(FORMATS)}") from error
    except InvalidImage:
        raise
    except Exception as error:  # damaged files raise whatever a decoder met
        raise InvalidImage(f"the image file is damaged: {error}") from error


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Sides that are multiples of ``factor``, nearly in proportion, with min to max pixels. Raises InvalidImage.

    Sides are rounded half to even, then scaled down or up if the product is out of the limits.
    """
    if max(height, width) > ASPECT_MAX * min(height, width):
        raise InvalidImage(
            f"the image is {width} x {height} pixels; a side may be {ASPECT_MAX} times the other at most"
        )
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def scale(image: Image.Image, vision: VisionConfig) -> NDArray[np.uint8]:
    """The scaled pixels, uint8 [height, width, 3]."""
    factor = vision.patch_size * vision.merge_size
    height, width = smart_resize(image.height, image.width, factor, vision.image.min_pixels, vision.image.max_pixels)
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def _check_size(width: int, height: int) -> None:
    if width * height > PIXELS_MAX or max(width, height) > SIDE_MAX:
        raise InvalidImage(
            f"the image is {width} x {height} pixels; the limits are {PIXELS_MAX} pixels and sides of {SIDE_MAX}"
        )


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Grey values of 16 bits by their upper half; Pillow itself would cut them off at 255."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def _patches(pixels: NDArray[np.uint8], grid: Grid, vision: VisionConfig) -> NDArray[np.float32]:
    """Normalise and cut: [patches, channels x frames x rows x columns], a still image being the same in each frame."""
    size, merge = vision.patch_size, vision.merge_size
    row, col = patch_places(grid, merge)
    cells = _normalised(pixels, vision).reshape(3, grid.rows, size, grid.cols, size)
    patches = cells[:, row, :, col, :]  # [patches, 3, size, size]: numpy puts the chosen axes first
    frames = np.repeat(patches[:, :, None], vision.temporal_patch_size, axis=2)
    return frames.reshape(grid.n_patches, -1)


def _normalised(pixels: NDArray[np.uint8], vision: VisionConfig) -> NDArray[np.float32]:
    """float32 [3, height, width]: (value / 255 - mean) / std, by a table of the 256 values of each channel."""
    values = np.arange(256, dtype=np.float32) / np.float32(255)
    mean, std = (np.array(figures, np.float32)[:, None] for figures in (vision.image.mean, vision.image.std))
    table = (values[None, :] - mean) / std
    return np.stack([table[channel][pixels[:, :, channel]] for channel in range(3)])
