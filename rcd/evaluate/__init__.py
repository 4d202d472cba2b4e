"""Grading answers, sweeping the commit threshold, and comparing two models at matched tokens per step."""
