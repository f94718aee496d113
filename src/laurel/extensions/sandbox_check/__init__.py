"""`laurel sandbox check`: how well this machine locks programs in, found by trying."""
