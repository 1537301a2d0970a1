"""What operators run: checks before go-live, plans for changed files, processes of a cluster, the demo."""
