"""`laurel data check`: what a data file holds, and which command can train on it."""
