"""Configuration: the sections of a run, their defaults, and the loader that reads files."""
