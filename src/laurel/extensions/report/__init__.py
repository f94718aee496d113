"""`laurel report`: the page of runs, written or served while they go on."""
