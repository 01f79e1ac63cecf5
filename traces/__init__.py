"""Traces of LLM requests: the schema, reading and writing, importing, generating, describing.

A trace is a Parquet file with one row per model call; `traces.schema.SCHEMA` says its columns.

    from traces import open_trace

    trace = open_trace("shipped:demo")
    for batch in trace.batches(columns=["arrival_s", "prompt_tokens"]):
        ...

- `open_trace`, `Trace`, `TraceWriter`, `shipped_traces`: the files (`traces.store`);
- `SCHEMA`, `SCHEMA_VERSION`, `TraceError`: the columns, and the one error class;
- `spread_ties`: spread equal coarse stamps before replay (`traces.spread`);
- `read_steps`, `StepTail`, `read_iteration_log`: step records of a vLLM server (`traces.steps`),
  read into a `Recording`, or followed as they are written;
- `import_trace`, `ReadOptions` (`traces.readers`): public formats and anyone's logs;
- `generate_trace`, `generate_bench`, `load_spec` (`traces.generate`): generated traces;
- `describe_trace` (`traces.describe`): rates, burstiness, lengths, prefix hits, shares;
- `traces.slicing`: a part cut out of a trace; `traces.pipeline`, `traces.sort`: batches in any
  order become a file; `traces.hints`: what a user probably meant;
- `traces.cli.trace`: the command group; `traces.shipped`: small generated traces.

Readers, generators and descriptions are imported when they are used, to keep a replay's memory
small.
"""

from traces.schema import SCHEMA, SCHEMA_VERSION, TraceError
from traces.spread import spread_ties
from traces.steps import Recording, StepTail, read_iteration_log, read_steps
from traces.store import Trace, TraceWriter, open_trace, shipped_traces

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "Recording",
    "StepTail",
    "Trace",
    "TraceError",
    "TraceWriter",
    "open_trace",
    "read_iteration_log",
    "read_steps",
    "shipped_traces",
    "spread_ties",
]
