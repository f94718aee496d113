"""`laurel doctor --trial`: what a run relies on, tried on this machine with models made here."""
