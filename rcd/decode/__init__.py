"""Decoding: one step (Algorithm 2's body), and the windows that call it. A window is a generator of events: it takes
the target, a reference or None, prompts as token ids, a resolved DecodeConfig and a generator for each row."""
