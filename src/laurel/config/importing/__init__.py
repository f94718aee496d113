"""Configurations of other systems, recognized and translated into Laurel's."""
