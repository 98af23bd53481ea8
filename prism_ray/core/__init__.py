"""Errors, strict configs, manifests, digests, atomic files."""
