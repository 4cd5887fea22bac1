"""What is measured, where it goes, and the report made of it."""
