"""Models spread over ranks: data, tensor and context parallelism."""
