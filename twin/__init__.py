"""The simulated world: recorded traffic through simulated vLLM replicas, driven by the policy.

The ways in; each is imported from its own module, since the command line has to start quickly:

- ``twin.replay.replay``: one run, and what came of it; ``twin.scenario``: runs with a claim;
- ``twin.engine.Engine``: one replica; ``twin.world.World``: all of it, for who drives it himself;
- ``twin.plan``, ``twin.tune``, ``twin.validate``: capacity, thresholds, evidence;
- ``twin.calibrate``: profiles from step records; ``twin.serve``: a simulated vLLM over HTTP.

The files:

- ``world``, ``agenda``: SimPy's events, and their order at the same instant;
- ``replicas``, ``fleet``, ``cards``: engines with what may happen to them; the rack; cards in time;
- ``faults``, ``failures``: what goes wrong; calls that come to nothing;
- ``source``, ``arrivals``, ``clients``: open-loop requests; a trace's columns; who waits;
- ``calls``, ``results``, ``summary``: a request in the world; as columns; a run's figures;
- ``answer_model``, ``drawn_answers``: the contract for what is answered; drawn by rules;
- ``errands``, ``watch``: what the policy asks for; samples and scraped metrics;
- ``dice``: draws by key; ``alone``: an engine without policy and world;
- ``replay``, ``report``, ``figures``, ``intervals``, ``uncertainty``: a run, shown and counted;
- ``story``, ``timeline``: one request, told from a log; all of them as a timeline;
- ``canaries``, ``drills``: deployments and drills, played;
- ``forecasts``, ``forecasting``, ``forecast_trial``, ``forecast_worth``: fed to a run; made of
  traces; held against simple ones; in GPU-hours;
- ``fit``, ``fit_operators``, ``regression``: the shipped profiles' coefficients, from tables;
- ``cli``, ``forecast_cli``, ``log_cli``, ``scenario_cli``: command groups; ``scenarios``: shipped.
"""
