"""Weight formats: code and scale grids, packing, planes, checkpoint conventions."""
