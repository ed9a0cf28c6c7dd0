"""The gRPC worker: one engine, the sessions in its memory, and their way to and from the snapshot store."""
