"""The plug-in's class that vLLM makes, one for each engine, in the API server's process."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase  # type: ignore[import-not-found]
from vllm.v1.metrics.stats import SchedulerStats  # type: ignore[import-not-found]

from .files import StepFile, clear_old
from .options import make_folder, read_options
from .rows import RowMaker, header
from .writer import Writer

logger = logging.getLogger("vllm.twinkeel_steps")
VLLM_LOGGER = "vllm.v1.metrics.loggers"

_INFO = Gauge("twinkeel_steps_info", "Where the step records are.", ["path", "engine", "life"])
_DROPPED = Counter("twinkeel_steps_dropped", "Step records that could not be kept.", ["engine"])
_LIFE = secrets.token_hex(8)
"""In the files and on the page: so a reader can tell this process's file from another one's."""
_made: list[StepRecorder] = []


class StepRecorder(StatLoggerBase):  # type: ignore[misc]
    """Records an engine's steps. No error leaves it: without a file it does nothing."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._config = vllm_config
        self._engine = engine_index
        observed = getattr(vllm_config, "observability_config", None)
        self._details = hasattr(SchedulerStats, "iteration_details") and bool(
            getattr(observed, "enable_logging_iteration_details", False)
        )
        self._writer: Writer | None = None
        self._begun = False
        _made.append(self)

    def log_engine_initialized(self) -> None:
        """All engines' loggers are there and the blocks are counted: the header can be written."""
        if self._begun:
            return
        self._begun = True
        try:
            self._begin()
        except Exception as error:
            logger.warning(
                "no step records of engine %d: %s: %s", self._engine, type(error).__name__, error
            )

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **_: Any,
    ) -> None:
        """Leave what vLLM tells for the writer: it changes neither object afterwards."""
        if self._writer is not None:
            self._writer.put((time.monotonic_ns(), scheduler_stats, iteration_stats, self._details))
        elif not self._begun:
            self.log_engine_initialized()
            self.record(scheduler_stats, iteration_stats)

    def close(self) -> None:
        """Write what is left and record no more."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _begin(self) -> None:
        options = read_options(os.environ)
        if options.folder is None:
            return
        make_folder(options.folder)
        clear_old(options.folder)
        for other in [each for each in _made if each._config is self._config]:
            if other is not self and other._engine == self._engine:  # vLLM made its loggers anew
                other.close()
                _made.remove(other)
        engines = sum(each._config is self._config for each in _made)
        first_line = partial(
            header, self._config, self._engine, engines, _vllm_version(), self._details, _LIFE
        )
        file = StepFile(options.folder, self._engine, options.room_bytes, first_line)
        file.write(())  # the header, before anybody is told of the file
        engine = str(self._engine)
        dropped = _DROPPED.labels(engine=engine)
        maker = RowMaker(getattr(self._config, "speculative_config", None) is not None)
        self._writer = Writer(file, maker.rows, logger.warning, dropped.inc)
        self._writer.start()
        atexit.register(self.close)
        _INFO.labels(path=str(file.path), engine=engine, life=_LIFE).set(1)
        if self._details and options.quiet:
            _silence_step_lines()
        logger.info("step records of engine %d: %s", self._engine, file.path)


class _StepLines(logging.Filter):
    """Lets through all but the line that vLLM prints for every step."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a step's line."""
        return not str(record.msg).startswith(("%sIteration(", "Iteration("))


def _silence_step_lines() -> None:
    target = logging.getLogger(VLLM_LOGGER)
    if not any(isinstance(each, _StepLines) for each in target.filters):
        target.addFilter(_StepLines())


def _vllm_version() -> str:
    import vllm  # type: ignore[import-not-found]

    return str(getattr(vllm, "__version__", "unknown"))
