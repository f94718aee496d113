"""Builds the objects of a run from its configuration, and runs training and evaluation."""
