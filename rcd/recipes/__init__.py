"""Recipes: functions that return a Recipe. The paper's runs, their baselines, and a smoke run for a laptop."""
