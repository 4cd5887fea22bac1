"""Files of docs/ that are written from the code, so that they cannot disagree with it: one module per file."""
