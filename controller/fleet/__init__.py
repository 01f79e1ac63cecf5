"""Where replicas come from: servers that someone else runs, processes of this machine, or pods.

``contract`` says what every kind of fleet does; ``config`` is the fleet file. The policy decides
who is started, stopped and isolated; here that is carried out, and what became of it is told.
"""
