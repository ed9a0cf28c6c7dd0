"""What a drill does, as data: no scenario knows whether it strikes processes, namespaces or boards."""

from kvferry.drills.scenarios.catalogue import SCENARIOS
from kvferry.drills.scenarios.model import Disturbance, Injection, Limits, Scenario, Where

__all__ = ["SCENARIOS", "Disturbance", "Injection", "Limits", "Scenario", "Where"]
