"""`laurel init`: a commented configuration to start from."""
