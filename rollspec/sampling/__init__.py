"""What is exact: keys of coupled noise (`streams`), which turns make one rollout (`conversations`), and SPEC-RL's lossy
rule (`lenient_reuse`, `scoring`). Pure functions; no engine.
"""
