"""Everything the coordinator can refuse, and who is at fault.

Three branches: the caller asked for something that cannot be (``BadRequest``), it cannot be in this state or not now
(``NotInThisState``, ``NotNow``), and the environment does not let the coordinator start (``CannotStart``). Each class
has a stable ``code`` (a key of ``kvferry.proto.status.STATUS_OF`` where it can reach a client) and each message is
one sentence.
"""

from __future__ import annotations

from typing import ClassVar


class CoordinatorError(Exception):
    """Base of the room's errors."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    retry_after_ms: ClassVar[int | None] = None


class BadRequest(CoordinatorError):
    """The caller can only mend this by asking for something else."""

    code = "invalid_request"


class EmptyPrompt(BadRequest):
    code = "empty_prompt"


class InvalidMessage(BadRequest):
    code = "invalid_message"


class NoVision(BadRequest):
    """Images for a model, or a fleet, that takes none."""

    code = "no_vision"


class ImagesTooLarge(BadRequest):
    """More images than one conversation may have."""

    code = "images_too_large"


class InvalidName(BadRequest):
    code = "invalid_name"


class InvalidSampling(BadRequest):
    code = "invalid_sampling"


class PromptTooLong(BadRequest):
    code = "prompt_too_long"


class IndexOutOfRange(BadRequest):
    code = "index_out_of_range"


class InvalidImport(BadRequest):
    """What is to be imported is no session that a coordinator exported."""

    code = "invalid_import"


class UnknownModel(BadRequest):
    code = "unknown_model"


class UnknownSession(BadRequest):
    code = "unknown_session"


class UnknownTurn(BadRequest):
    code = "unknown_turn"


class SessionExists(BadRequest):
    code = "session_exists"


class TurnExists(BadRequest):
    code = "turn_exists"


class NotInThisState(CoordinatorError):
    """The same request may be right at another time, or to another cluster."""

    code = "session_busy"


class SessionBusy(NotInThisState):
    code = "session_busy"


class StaleEpoch(NotInThisState):
    code = "stale_epoch"


class ModelMismatch(NotInThisState):
    code = "model_mismatch"


class NodeIdTaken(NotInThisState):
    code = "node_id_taken"


class NotNow(CoordinatorError):
    """Asking again later can help."""

    code = "no_node"
    retry_after_ms = 1_000


class NoNode(NotNow):
    code = "no_node"


class QueueFull(NotNow):
    code = "queue_full"


class Stopping(NotNow):
    code = "draining"


class RegistryUnavailable(NotNow):
    """The registry's disk or service does not answer as it should."""

    code = "registry_unavailable"


class TurnElsewhere(NotNow):
    """Another coordinator that shares the registry answers the turn."""

    code = "turn_elsewhere"
    retry_after_ms = 200

    def __init__(self, session_id: str, turn_id: str, address: str) -> None:
        where = f"at {address}" if address else "which has not said yet where it serves"
        super().__init__(f"turn {turn_id} of session {session_id} is answered by another coordinator, {where}")
        self.address = address


class CannotStart(CoordinatorError):
    """Something outside the program must be put right first."""

    code = "cannot_start"


class InvalidSettings(CannotStart):
    code = "invalid_settings"


class StatePathInvalid(CannotStart):
    code = "state_path_invalid"


class StorePathInvalid(CannotStart):
    code = "store_path_invalid"


class StateInUse(CannotStart):
    code = "state_in_use"


class StateIncompatible(CannotStart):
    code = "state_incompatible"


class CannotListen(CannotStart):
    code = "cannot_listen"
