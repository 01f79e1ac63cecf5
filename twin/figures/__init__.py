"""The figures of a scenario's run, gathered in bounded memory while it goes on.

``Measure`` says what is asked for beyond what always is: ``Above`` a limit, within a ``Span``.

- ``collect``: everything of one run; ``measure``: what is asked for;
- ``requests``, ``group``, ``columns``: all requests, some of them, thousands of them as columns;
- ``spread``: the distribution of a duration; ``bounds``: how large a share may be;
- ``watch``, ``incidents``: the decision log looked over, and what went wrong in it;
- ``contexts``: mixed-up sessions; ``hours``: what the fleet costs.
"""

from twin.figures.measure import Above, Measure, Span

__all__ = ["Above", "Measure", "Span"]
