"""`laurel eval`: how good a reward model or a policy is."""
