"""What is exact, and how that is checked."""
