"""Engines that generate and score with many scale planes over one code plane: the protocol, the plane cache, tenancy, the HTTP application. No Ray."""
