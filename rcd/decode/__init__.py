"""Decoding: Algorithm 2 to read (`simple`), its step (`step`), and the engine, which serves many requests at once."""
