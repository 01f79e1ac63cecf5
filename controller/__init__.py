"""The live world: a gateway in front of real vLLM servers, driven by the policy.

Facts become events, decisions are carried out; nothing is decided here. The ways in are
the commands, ``serve.serve``, which is what ``twinkeel serve`` calls, and the library for agents,
``controller.chains``.

- ``serve``: puts it together; ``config``: what it is started with; ``beginning``: the policy as a
  process before left it;
- ``driver``: between everything and the policy; ``errands``: what the policy asks for;
  ``call``: a request; ``listener``: who is told what happens; ``reading``: what metrics show of it;
- ``observe``: a second policy that decides for nobody; ``forecasting``: counts, told as forecasts;
- ``http``, ``accepting``: clients and servers; ``openapi``: the published descriptions;
- ``gateway``, ``upstream``: the callers' side and the servers' side;
- ``telemetry``, ``store``, ``admin``: who listens, what stays, what operators see and do;
- ``sharing``: what several controllers share; ``chains``: the library for agents;
- ``fleet``, ``gpus``: where replicas come from, and the cards under them;
- ``deployment``, ``drills``, ``calibration``: policies into force; faults on purpose; a profile;
- ``cli``, ``fleet_cli``, ``gpu_cli``, ``partition_cli``, ``model_cli``, ``trace_cli``: commands;
  ``demo``: the live demo;
- ``deploy``: container and Kubernetes files; ``vllm_plugin``: for vLLM's own environment.
"""
