"""Writes the page of a run, and serves it while the run goes on."""
