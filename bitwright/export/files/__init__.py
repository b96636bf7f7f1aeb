"""Atomic writes, manifests, and finished layers of long methods."""
