"""Training data: where rows come from, how they become tokens, and what was dropped and why."""
