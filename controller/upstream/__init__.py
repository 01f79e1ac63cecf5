"""The servers' side: finding them, calling them, and judging what comes back.

- ``discovery``, ``matching``: what a server is, and which profile belongs to it;
- ``replica``: a server as the controller sees it; ``watching``, ``scrape``, ``steps``: whether it
  is there, its metrics, its own step records; ``warming``: its first requests;
- ``client``: one try of a request; ``outgoing``: what is sent; ``sse``: what comes, as events;
  ``judge``: whether that is an answer;
- ``embeddings``: vectors of questions; ``threads``: work that may hang for good.
"""
