"""Benchmarks: real engines, alternating runs, ratios with their spread, JSON with provenance."""
