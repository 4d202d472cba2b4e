"""Fast decoding: slots, graphs, continuous batching. What it computes is what `rcd.decode` computes."""
