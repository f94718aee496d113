"""The demo, with generators of its data."""
