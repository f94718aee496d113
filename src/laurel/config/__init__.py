"""What a person may write: the sections of a run, their defaults, and how files become them."""
