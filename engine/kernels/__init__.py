"""The arithmetic of the model path: llvmlite IR builders and the nogil functions made of them (docs/numerics.md)."""
