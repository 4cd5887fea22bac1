"""The draft head in an engine's worker: what it reads, its training data, its versions and its training. No vLLM here.

draft_head.py   `DraftHead`: its passes, the hidden states it keeps, positions that it reads late
host.py         `Host`: all that it needs of the worker
capture.py      training samples from what the target computes anyway
training.py     its samples to the trainer, which is a process that the job's engines share, and versions from it
swap/           new weights into the running engine, on canary, promoted or rolled back
"""
