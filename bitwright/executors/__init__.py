"""Integer arithmetic of targets, operator by operator, in numpy: what a kernel makes of the codes that it reads."""
