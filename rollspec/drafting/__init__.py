"""Who drafts: lookup of what was said before."""
