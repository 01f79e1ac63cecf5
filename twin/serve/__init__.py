"""The twin served over HTTP in real time: vLLM's API with a profile's timing.

Whoever talks to it should not be able to tell it from ``vllm serve``, as far as answers, errors,
metrics and times go. ``server.serving`` runs one in the caller's event loop, and
``python -m twin.serve`` one in a process of its own.

- ``server``: routes and requests in flight; ``wire``: HTTP, byte by byte; ``cli``: the command;
- ``asking``: requests, checked as vLLM does; ``replies``, ``answers``: tokens become bytes;
- ``words``: what it says, and how sure it is;
- ``engine``, ``alarm``: the engine in real time, and its timer;
- ``metrics``, ``steps``: ``/metrics``, and step records as the plug-in writes them;
- ``faults``: what can be made to go wrong.
"""
