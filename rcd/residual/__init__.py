"""The paper's idea as pure tensor functions: Eq. 1-3 and the starts of Algorithm 2. Imports torch and nothing of rcd
but its errors.
"""
