"""The planner: it assigns slots to roles, estimates memory and time, and reports conflicts."""
