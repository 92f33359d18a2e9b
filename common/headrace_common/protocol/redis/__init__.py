"""The queue over Redis Streams: both sides, the stores, the registry."""
