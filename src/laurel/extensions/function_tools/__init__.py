"""Python functions that the policy calls before an answer that another environment grades."""
