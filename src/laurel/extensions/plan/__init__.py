"""`laurel plan`: where each part of a run would be placed, and whether it fits."""
