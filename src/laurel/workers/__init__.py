"""Processes that work for a run: started here or on Ray, called, watched and ended."""

import os

# Else any call of Ray's in a thread that a run has left behind would start a second cluster, of
# Ray's own choice, when the first has ended. Read where Ray is imported.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
