"""Runs the demo, and generates its data."""
