"""What is exact, and how that is checked.

`noise`, `streams` and `coupled` are coupled sampling, `lenient` tells what a lossy rule would do. `audit` holds the
statistics and the verdict and needs numpy and scipy only; `audit_noise` checks coupled tokens one by one; `audit_run`
runs the engines.
"""
