"""The slow float path: every architecture in plain numpy, from dequantised weights, to hold the engine against.

Written to be read: no kernels, no batches, one sequence at a time. ``dense.py`` is a decoder layer, ``moe.py`` the
choice of experts, ``vision.py`` the vision tower, ``layers.py`` what they share, ``model.py`` the whole.
"""

from kvferry.engine.reference.model import Images, ReferenceModel, ReferenceOutput, SequenceState

__all__ = ["Images", "ReferenceModel", "ReferenceOutput", "SequenceState"]
