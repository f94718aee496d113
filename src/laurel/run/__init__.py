"""From a configuration to the objects of a run. Only this room knows every concrete class."""
