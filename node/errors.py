"""What a node refuses or cannot do. `code` is a key of proto.status.STATUS_OF where it can reach a client."""

from __future__ import annotations

from typing import ClassVar


class NodeError(Exception):
    """Base class; str(e) is one sentence for a person: what, where, what to do."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    retry_after_ms: ClassVar[int | None] = None


# At start: the operator has to change something.


class ConfigInvalid(NodeError):
    """Settings that cannot be used; the message lists every problem."""

    code = "invalid_config"


class PortInUse(NodeError):
    """Somebody else listens at our address, or it is not ours to listen at."""

    code = "port_in_use"


class StoreMisconfigured(NodeError):
    """The store's path cannot become a store until somebody changes it: a file, or a folder we may not use."""

    code = "store_misconfigured"


class NodeUnreachable(NodeError):
    """Nobody answers as a node at an address."""

    code = "node_unreachable"


# In answer to a request: the caller asked for something that cannot be.


class InvalidRequest(NodeError):
    """A request outside its bounds."""

    code = "invalid_request"


class NoVision(NodeError):
    """Images for a node whose model has no vision tower."""

    code = "no_vision"


class StaleEpoch(NodeError):
    """The session was given to somebody else since."""

    code = "stale_epoch"


class StaleCoordinator(NodeError):
    """The caller is an older coordinator than one that was heard before."""

    code = "stale_coordinator"


class SessionBusy(NodeError):
    """The session has a running turn of the same epoch."""

    code = "session_busy"


class UnknownSession(NodeError):
    """The session is not resident here."""

    code = "unknown_session"


# In answer to a request: not now, not here.


class Starting(NodeError):
    """The engine is still loading or warming up."""

    code = "starting"
    retry_after_ms = 500


class Draining(NodeError):
    """The node takes no turns any more, and lets go of those it has."""

    code = "draining"


class LeaseLost(NodeError):
    """The coordinator has not been heard for a whole lease."""

    code = "lease_lost"


class QueueFull(NodeError):
    """As many turns run and wait here as may."""

    code = "queue_full"
    retry_after_ms = 1_000


class SlowClient(NodeError):
    """The caller does not read what it asked for."""

    code = "slow_client"


class StoreDown(NodeError):
    """The store did not take or give what was asked; rows in memory are as they were."""

    code = "store_unavailable"
    retry_after_ms = 2_000


class EngineFailed(NodeError):
    """A bug of ours: the engine thread ended. The process ends after saying so."""

    code = "internal"
