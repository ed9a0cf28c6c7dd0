"""What can go wrong while a local cluster is started or broken on purpose."""

from __future__ import annotations

from typing import ClassVar


class DrillError(Exception):
    """Base; str(error) is one sentence for a person."""

    code: ClassVar[str] = "drill_error"
    exit_code: int = 1  # of the class; of the instance where a process of ours ended with its own


class ProcessFailed(DrillError):
    """A process of the cluster ended by itself, or never became ready."""

    code = "process_failed"


class DirectoryBusy(DrillError):
    """Another cluster runs in the same directory."""

    code = "directory_busy"


class PortUnusable(DrillError):
    """The coordinator's port is taken, or not ours to take."""

    code = "port_unusable"


class ModelUnavailable(DrillError):
    """The model could not be fetched."""

    code = "model_unavailable"


class ModelUnusable(DrillError):
    """What was named is there, or is a path, and is not a model."""

    code = "model_unusable"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DrillImpossible(DrillError):
    """What the drill wanted to do could not be done, so it says nothing about the cluster."""

    code = "drill_impossible"


class VerdictFailed(DrillError):
    """The drill ran, and the cluster did not keep its promise."""

    code = "verdict_failed"
    exit_code = 20  # unlike every reason not to run at all
