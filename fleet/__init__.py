"""What an operator's own machine does for a fleet of boards."""
