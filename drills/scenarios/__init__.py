"""What a drill does, as data: no scenario knows whether it strikes processes, namespaces or boards."""

from kvferry.drills.scenarios.catalogue import SCENARIOS
from kvferry.drills.scenarios.model import COORDINATOR, STORE, Disturbance, Injection, Limits, Scenario, Where

__all__ = ["COORDINATOR", "SCENARIOS", "STORE", "Disturbance", "Injection", "Limits", "Scenario", "Where"]
