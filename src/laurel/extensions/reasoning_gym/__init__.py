"""Generated tasks of reasoning-gym, and its scorers (extra `reasoning-gym`)."""
