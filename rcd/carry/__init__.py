"""Carries: what travels from denoising step k-1 to step k. Each is a frozen object of settings with begin,
inject and update; `rcd.carry.base` states the contract.
"""
