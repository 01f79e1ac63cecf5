"""The evidence for a policy: everything is played, beside the live policy, judged, and written.

``making.validate`` does all of it, for the command and for the app.

- ``setups``: what is played; ``playing``: plays it; ``reading``: what a decision log says of a run;
- ``gates``, ``storms``: what must hold, and what a policy may do to itself;
- ``expecting``: what the canary should show, said beforehand; ``numbers``: shares with intervals;
- ``showing``: evidence in a terminal; ``cli``: the commands.
"""
