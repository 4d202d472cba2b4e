"""The paper's idea as pure tensor functions: Eq. 1-3 and the starts of Algorithm 2. Needs torch, and of rcd only the
registry of names.
"""
