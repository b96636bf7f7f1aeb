"""Compression: fewer operations in a model of either front end."""
