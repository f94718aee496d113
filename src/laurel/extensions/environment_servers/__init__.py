"""Sessions of servers of OpenEnv and of the Open Reward Standard (extras of these names)."""
