"""Drills: something is broken on purpose, and what becomes of it is measured.

- ``cli``: the command; ``measure``: one drill, from the plan to the verdict;
- ``inject``, ``proxy``: what is broken, and a link that can be made bad;
- ``asking``: the controller under it; ``opening``: how things stood when its log began;
- ``demo``: a fleet of its own, for drills that harm nobody.
"""
