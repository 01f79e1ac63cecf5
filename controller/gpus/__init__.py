"""The cards of this machine: what NVML says of them, how they fail, and how they are cut up.

- ``nvml``: what it says; ``asking``: the thread that asks; ``apart``: a process that asks;
- ``watching``: what cards say becomes events; ``topology``: how near they are to each other;
- ``mig``: layouts and plans of slices; ``mig_device``: carries them out;
- ``view``, ``gauges``: a card as people see it, and as Prometheus does.
"""
