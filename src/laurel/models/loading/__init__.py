"""Loads models from directories or the hub, or creates them with random weights."""
