"""The commands of `kvferry kv`."""
