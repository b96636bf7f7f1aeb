"""Files that appear whole or not at all: atomic writes, manifests, finished layers of a long method."""
