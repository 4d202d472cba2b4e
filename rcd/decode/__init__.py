"""Decoding: one step (Algorithm 2's body), and the windows that call it. A window is a generator of events."""
