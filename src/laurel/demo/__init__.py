"""The demo, and the data that it makes."""
