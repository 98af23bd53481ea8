"""Drift of variants from their base: load, read features, measure, judge. The mathematics is in `prism_ray.risk`."""
