"""`laurel doctor`: what this machine has, and a trial of what training relies on."""
