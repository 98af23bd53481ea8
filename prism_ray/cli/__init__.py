"""Prism-ray …: one thin file a verb."""
