"""Answers to a file of prompts: in its order, resumable, by one process, several, or a cluster."""
