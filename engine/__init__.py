"""Weights, kernels, model, KV cache, batching and sampling. Knows nothing of snapshot files, sessions or gRPC."""
