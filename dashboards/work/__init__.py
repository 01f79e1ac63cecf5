"""What a job's process does: one module a kind, each with ``run(request, folder, tell)``.

- ``replay``, ``story``, ``describe``: a scenario played; one of its requests; a long trace;
- ``ask``, ``plan``: a planner's question, and the plan;
- ``tune``, ``validate``: what the commands of these names do;
- ``forecast``, ``forecast_worth``: how well a load is forecast, and what that is worth;
- ``drill``: what ``twinkeel drill`` does.
"""
