"""GRPO with TRL on written-out arithmetic: the job of `examples/grpo_arithmetic` in one script.

Usage: ``python -m examples.trl_grpo.train --out runs/trl`` from the repository root.
"""
