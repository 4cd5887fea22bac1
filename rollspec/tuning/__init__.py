"""How much to draft: arms, policies, the cost model and the guard."""
