"""Additive moments and the drift statistics built on them."""
