"""Runs in the process of a script, and imports the standard library and `laurel.sandbox.inside`."""
