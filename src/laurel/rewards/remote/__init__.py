"""Scoring with servers that may die, hang or lie."""
