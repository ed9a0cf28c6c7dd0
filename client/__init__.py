"""The Python SDK (sync and asyncio) and the command line."""
