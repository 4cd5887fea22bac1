"""Continual drafter training; knows no RL trainer and no engine internals."""
