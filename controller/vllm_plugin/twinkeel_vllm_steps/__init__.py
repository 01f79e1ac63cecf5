"""Records what every vLLM engine step did. vLLM loads `logger.StepRecorder` by its entry point."""

__version__ = "0.1.0"
