"""The callers' side: an OpenAI-compatible HTTP server, put up by ``app``.

- ``app``: reads a request, waits for its outcome, has its caller told;
- ``asking``, ``keys``: what the policy may know of a request, and whose it is;
- ``telling``, ``streams``, ``errors``, ``editing``: an outcome; a stream; a refusal; what features
  change in an answer's bytes;
- ``answers``, ``questions``: answers that are kept, and which question is the same;
- ``chains``, ``steps``: what the store knows of a chain; a client's own steps;
- ``slow``: callers that take their time; ``gauges``: Prometheus families of kept answers.
"""
