"""Encodings files, versions 0.6.1, 1.0.0 and 2.0.0: written, read, and matched with the sites of a simulation."""
