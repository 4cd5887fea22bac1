"""What is exact, and how that is checked.

`audit` holds the statistics and the verdict and needs numpy and scipy only; `audit_run` runs the engines.
"""
