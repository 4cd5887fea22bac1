"""GRPO on small tasks for a real instruct model: word problems, lists and words, JSON by instruction; rewards by rules.

Usage: ``rollspec demo --model smollm2``; for the data alone ``python -m examples.grpo_tasks.prepare --out DIR --json``.
"""
