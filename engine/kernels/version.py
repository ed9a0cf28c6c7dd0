"""The version of the arithmetic that docs/numerics.md defines."""

from typing import Final

# Raised whenever any operation, constant or order in the model path changes: it is part of every model's fingerprint,
# so rows computed under two versions never meet.
NUMERICS_VERSION: Final = 1
