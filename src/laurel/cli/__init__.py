"""The command line: parses arguments, starts the work, and prints the results."""
