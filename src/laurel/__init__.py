"""Laurel: reward models trained, proven, served and learned from."""

__version__ = "0.1.0"

__all__ = ["__version__"]
