"""What is exact: keys of coupled noise (`streams`), how well engine and trainer agree (`health`), and SPEC-RL's lossy
rule (`lenient`, `lenient_reuse`, `scoring`). Pure functions; no engine.
"""
