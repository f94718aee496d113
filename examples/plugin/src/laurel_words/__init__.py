"""An environment, a loss, a logger and a dialect for Laurel: each module is a plug-in."""
