"""A checkpoint's tensors by the native decoder's names."""
