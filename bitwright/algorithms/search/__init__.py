"""Methods that try configurations and compare results: recipes, progressive quantization, which layers get what."""
