"""The demonstration: one small GRPO job on this machine, without and with rollspec, and a report about the two."""
