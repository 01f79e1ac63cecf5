"""The callers' side: an OpenAI-compatible HTTP server."""
