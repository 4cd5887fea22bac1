"""`openrlhf.cli.train_ppo_ray` with rollspec on; takes the same arguments."""

from __future__ import annotations

import runpy

import rollspec_openrlhf
from rollspec.config import switched_on

if __name__ == "__main__":
    rollspec_openrlhf.enable(switched_on() or "default")
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
