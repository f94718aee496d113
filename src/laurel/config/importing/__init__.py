"""Recognizes configurations of other systems and translates them into Laurel's."""
