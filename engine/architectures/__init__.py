"""The architectures the engine knows, one file each.

To add one: write a file beside the others that names it and says what its layers have that a plain decoder has not;
list it in ``registry.py``; if it has a part no other has, give ``ModelConfig`` a field for it, the tensors' names to
``files/tensor_names.py``, the arithmetic to ``reference/`` first and to the kernels then (a field of
``kernels/records.py`` that is 0 where a model lacks the part, filled in by ``packing.py``; its order of operations in
docs/numerics.md and ``kernels/definition.py``); and put a recorded model of its kind under ``tests/golden`` and its
name into ``tests/engine/architectures``.
"""
