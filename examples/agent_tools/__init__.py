"""GRPO with tools: a policy that calls a calculator and a Python sandbox, and goes on with what they answer.

Usage: ``python -m examples.agent_tools.job --out runs/tools`` from the repository root.
"""
