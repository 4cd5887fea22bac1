"""Commands of the repository that are not installed."""
