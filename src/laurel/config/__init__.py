"""Defines the configuration of runs, with all defaults, and loads it from files and overrides."""
