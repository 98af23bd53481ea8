"""FP4 formats, grids, packing, planes, checkpoint conventions."""
