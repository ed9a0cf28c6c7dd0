"""Pictures for conversations: noise, so that each is unlike all others."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def picture(seed: int, width: int = 160, height: int = 96) -> bytes:
    """A PNG file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
