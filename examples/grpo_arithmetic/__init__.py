"""GRPO on written-out arithmetic: a small trained policy, its data, its reward and the script that made it.

Usage: ``python -m examples.grpo_arithmetic.prepare --out DIR --json`` from the repository root.
"""
