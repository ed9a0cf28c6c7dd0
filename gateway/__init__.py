"""The OpenAI HTTP API in front of a coordinator: a client of it like any other."""
