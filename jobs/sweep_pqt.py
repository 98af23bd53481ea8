"""Sweep regularizer strength and Scale-QLoRA rank: `ray job submit --working-dir . -- python jobs/sweep_pqt.py [--space module:function] [key=value …]`."""

import sys

from prism_ray.cli.main import run

if __name__ == "__main__":
    sys.exit(run(["sweep", *sys.argv[1:]]))
