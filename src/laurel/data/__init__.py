"""Reads, checks and tokenizes training data, and lays it out as groups and token forests."""
