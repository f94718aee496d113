"""What learns: models loaded, computed as forests, split over ranks; the scoring contract."""
