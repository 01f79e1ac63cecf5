"""The figures of a scenario's run, gathered in bounded memory while it goes on."""

from twin.figures.measure import Above, Measure, Span

__all__ = ["Above", "Measure", "Span"]
