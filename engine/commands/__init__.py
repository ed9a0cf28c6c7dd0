"""The engine's commands; each module is imported when its command runs, see engine/cli.py."""
