"""`laurel config import`: configurations of other systems, translated."""
