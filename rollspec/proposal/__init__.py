"""Who drafts, and how far. Pure: numpy and arctic-inference, no engine."""
