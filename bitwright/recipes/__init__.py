"""``quantize``, recipes and their steps, the judge of a step, and what each quantizer costs the outputs."""
