"""Which role gets which slots, how much memory that takes, and what does not fit."""
