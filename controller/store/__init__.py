"""What outlives the process: the decision log, the trace, the database.

- ``folder``: the data folder, one controller's at a time; ``secret``: keys that are made once;
- ``log``, ``recovery``: the decision log, and the policy as it was when the controller died;
- ``recorder``: the trace that the twin replays;
- ``sqlite``: how its files in SQLite are opened;
- ``database``, ``deployments``: breakers and deployments;
- ``checkpoints``, ``chains``: finished steps in SQLite or Redis, and off the event loop;
- ``steps``: what each step of a chain was, for people;
- ``answers``: kept answers; ``samples``, ``redaction``: sampled texts, and what is taken out.
"""
