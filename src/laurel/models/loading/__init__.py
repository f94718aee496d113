"""Models from a directory, from the hub or from nothing."""
