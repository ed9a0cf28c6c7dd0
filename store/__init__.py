"""KV snapshots on a shared file system: the VLKV codec, publishing, the LCP index, eviction. Knows nothing of models
or gRPC."""
