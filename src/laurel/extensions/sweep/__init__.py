"""`laurel sweep`: the settings of a reward model that do best in validation."""
