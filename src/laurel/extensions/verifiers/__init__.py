"""Tasksets of the package verifiers, played by its own runner (extra `verifiers`)."""
