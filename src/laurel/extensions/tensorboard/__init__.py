"""Events for TensorBoard."""
