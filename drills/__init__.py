"""Real clusters of processes: starting them, breaking them, and judging what happened."""
