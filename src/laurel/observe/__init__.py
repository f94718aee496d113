"""What happened: metrics, loggers, progress, alarms and reports."""
