"""The commands: from what a person typed to the objects of a run, and to what is printed."""
