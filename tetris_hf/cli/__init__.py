"""The command line `tetris-hf`: `generate`, `bench` and `stats`."""

from .main import main


__all__ = ["main"]
