"""Integer arithmetic of targets in numpy, operator by operator: the codes that a kernel computes."""
