"""The interface to inference engines, and vLLM behind it."""
