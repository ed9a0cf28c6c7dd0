"""The wire contract: .proto files, the stubs generated from them, gRPC options and the error table."""
