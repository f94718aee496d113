"""Configurations of other systems, told apart and translated into Laurel's."""
