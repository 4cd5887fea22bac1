"""How much to draft: what a step costs."""
