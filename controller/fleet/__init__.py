"""Where replicas come from: servers that someone else runs, processes of this machine, or pods.

``contract`` says what every kind of fleet does; ``config`` is the fleet file. The policy decides
who is started, stopped and isolated; here that is carried out, and what became of it is told.

- ``opening``: which kind the settings ask for; ``show``: a fleet as a table;
- ``static``: servers that someone else runs;
- ``local``: processes: ``slot`` is their state machine, ``seats`` what runs where, ``processes``
  starts and ends them, ``memory`` and ``room`` say what fits;
- ``kubernetes``: pods; ``kubernetes_config``, ``kubernetes_api``, ``kubernetes_scaling``: its fleet
  file, its calls, and how many pods;
- ``reload``, ``swapping``, ``checking``: a new version of a model: beside the old one, in its
  place, and whether it answers as it should;
- ``drill``: a broken card, told though it is well.
"""
