"""The twin served over HTTP in real time: vLLM's API with a profile's timing.

Whoever talks to it should not be able to tell it from ``vllm serve``, as far as answers, errors,
metrics and times go. ``server.serving`` runs one in the caller's event loop, and
``python -m twin.serve`` one in a process of its own.
"""
