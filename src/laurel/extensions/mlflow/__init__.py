"""The logger of MLflow (extra `mlflow`)."""
