"""What can go wrong in the engine: one small tree, each class with a stable code and a sentence for a person.

``code`` is what programs test for; it travels to clients where the table of statuses knows it. ``exit_code`` is what a
command ends with. ``str(error)`` says what, where, and what to do.
"""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    """Base class: whatever the engine refuses or cannot do."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1


class ModelNotFound(EngineError):
    """No model of this name is fetched and no file or folder is there."""

    code: ClassVar[str] = "model_not_found"
    exit_code: ClassVar[int] = 3


class ModelInvalid(EngineError):
    """The file or folder is there and is not a whole, well-formed model."""

    code: ClassVar[str] = "model_invalid"
    exit_code: ClassVar[int] = 4


class UnsupportedArchitecture(EngineError):
    """A well-formed model that this version cannot run exactly; the sentence names what is supported."""

    code: ClassVar[str] = "unsupported_architecture"
    exit_code: ClassVar[int] = 5


class FetchFailed(EngineError):
    """A model could not be fetched: no network, no such model, or not the promised bytes."""

    code: ClassVar[str] = "fetch_failed"
    exit_code: ClassVar[int] = 6


class InvalidSampling(EngineError):
    """A sampling setting outside its range; the sentence names the setting, its value and the range."""

    code: ClassVar[str] = "invalid_sampling"


class InvalidMessage(EngineError):
    """Chat messages that the model's template refuses or that cannot be rendered within its limits."""

    code: ClassVar[str] = "invalid_message"


class InvalidImage(EngineError):
    """An image that is damaged, of another kind than the supported ones, or beyond the limits."""

    code: ClassVar[str] = "invalid_image"
    exit_code: ClassVar[int] = 9


class ContextExceeded(EngineError):
    """More tokens than the context length holds."""

    code: ClassVar[str] = "prompt_too_long"
    exit_code: ClassVar[int] = 8


class OutOfKvMemory(EngineError):
    """No free block is left in the KV pool; release a sequence, or give the pool more memory."""

    code: ClassVar[str] = "out_of_kv_memory"


class InvalidTokens(EngineError):
    """Token ids that are not tokens of the model, or a batch that is not well-formed."""

    code: ClassVar[str] = "invalid_tokens"
    exit_code: ClassVar[int] = 12


class OutputUnwritable(EngineError):
    """The file that results should go to cannot be written, or its disk has no room for them."""

    code: ClassVar[str] = "output_unwritable"
    exit_code: ClassVar[int] = 10


class OutOfResources(EngineError):
    """The system gives no more memory or threads."""

    code: ClassVar[str] = "out_of_resources"
    exit_code: ClassVar[int] = 11


class SelfTestFailed(EngineError):
    """The kernels compute other bits here than everywhere else; nothing may be served with them."""

    code: ClassVar[str] = "self_test_failed"
    exit_code: ClassVar[int] = 7


class InvalidFormat(EngineError):
    """The form that an answer shall have cannot be understood: a schema, a regular expression, or choices."""

    code: ClassVar[str] = "invalid_format"


class FormatTooComplex(EngineError):
    """The form that an answer shall have would take too much time or memory to follow."""

    code: ClassVar[str] = "format_too_complex"


class InvalidTools(EngineError):
    """Tools that cannot be told to the model or followed: a name, a schema, or too many of them."""

    code: ClassVar[str] = "invalid_tools"
