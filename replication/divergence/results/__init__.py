"""What a check finds, as data and as files: differences, a run's folder, the history of runs."""
