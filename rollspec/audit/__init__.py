"""Did these tokens come from the target's distribution? Statistics and verdict, and the engines that are asked.

`verdict`, `distribution`, `statistics` and `evidence` need numpy and scipy only; `noise` checks coupled tokens
one by one; `run` drives engines (`engine`, `worker`) and the reference model (`reference`).
"""
