"""Tuning: which values of a policy's parameters are better, on the same requests, and confirmed.

``tuning.tune`` runs a whole one, which ``asking`` helps to put together from plain values.

- ``space``: what may be tuned; ``offers``: what people may want; ``edit``: a changed policy file;
- ``objectives``: what a trial is judged by; ``compare``: two policies on the same requests;
- ``study``: which policies are tried; ``race``: the best ones again; ``confirm``: on held-out load;
- ``work``: what a trial plays; ``held``: its trace in memory; ``engines``: where: cores or Ray;
- ``output``, ``progress``: files and tables; the bars; ``cli``: the command.
"""
