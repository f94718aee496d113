"""Trains reward models, and policies on demonstrations, and has what all training shares."""
