"""Bodies and answers of Anthropic's API, `/v1/messages`.

Imports openai: bodies become its chats.
"""
