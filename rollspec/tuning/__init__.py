"""How much to draft: arms, strategies, the cost model and the guard."""
