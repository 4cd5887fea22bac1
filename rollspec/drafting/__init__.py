"""Who drafts: the interface of drafters, what is kept per request, and what a step selects of what they propose."""
