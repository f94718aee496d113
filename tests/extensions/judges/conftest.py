"""Tiny models are quickest, and give the same bits everywhere, on one thread."""

import threads

one_thread = threads.one_thread
