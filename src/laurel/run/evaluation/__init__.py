"""Runs the evaluations of reward models and policies, and reports their results."""
