"""Calibrate and quantize on the cluster: `ray job submit --working-dir . -- python jobs/calibrate.py MODEL --data FILE --out DIR [--workers N] [key=value …]`."""

import sys

from prism_ray.cli.main import run

if __name__ == "__main__":
    sys.exit(run(["quantize", *sys.argv[1:], "--ray"]))
