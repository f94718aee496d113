"""`laurel config show`: a configuration with all defaults, or the JSON schema of such files."""
