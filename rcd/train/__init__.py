"""Training: the paper's two stages (Algorithm 1), with the same carry that decoding uses."""
