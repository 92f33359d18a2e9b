"""Makes linear layers for a device from a checkpoint's weights."""
