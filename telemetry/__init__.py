"""What processes tell a monitor about themselves: Prometheus metrics with stable names (docs/metrics.md)."""
