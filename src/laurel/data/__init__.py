"""Training data: rows of any form, read and checked, as groups and as token forests."""
