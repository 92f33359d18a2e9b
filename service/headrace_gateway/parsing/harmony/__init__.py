"""gpt-oss's chat format: reads, counts and constrains its messages, and prepares its
conversations."""
