"""Who drafts, and how far. Pure: numpy, numba, no engine."""
