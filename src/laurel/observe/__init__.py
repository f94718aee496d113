"""Records and reports what happens in a run: metrics, loggers, progress, alarms and reports."""
