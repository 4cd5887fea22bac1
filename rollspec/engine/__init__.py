"""The seam to inference engines."""
