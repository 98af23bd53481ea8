"""The only package that imports ray."""
