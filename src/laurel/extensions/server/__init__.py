"""A reward model served over HTTP."""
