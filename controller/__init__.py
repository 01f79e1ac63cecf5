"""The live world: a gateway in front of real vLLM servers, driven by the policy.

Facts become events, decisions are carried out; nothing is decided here. ``serve`` puts it together:
``gateway`` faces the callers, ``upstream`` the servers, ``driver`` stands between both and the
policy, ``telemetry`` and ``store`` listen.
"""
