"""Sessions, membership, routing, failover and the durable registry, behind the client-facing gRPC service."""
