"""LiteRT (TensorFlow Lite) files: a QDQ model as a flatbuffer with integer kernels."""
