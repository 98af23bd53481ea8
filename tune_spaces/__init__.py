"""Runs and search spaces: plain functions that return a full, typed config."""
