"""The Streamlit app: replay, what-if, tune, forecast, live, drills, deploy; for people who rather
look.

It has no logic of its own: what is computed is computed by ``twin``, what is live is asked of the
controller's admin API.

- ``app``: the frame of all pages; ``app_pages``: one file a page;
- ``parts``: what several pages show (the scenario's form, a job's progress, charts);
- ``scenario``: what is looked at, shared by all pages, and how it is written in the URL;
- ``jobs``: long work in processes of its own, and the store that remembers it; ``work``: what these
  processes do, one module a kind;
- ``admin``: the client of the admin API; ``state``: what a browser's session keeps;
- ``shelf``: traces and policies that were uploaded; ``words``: all texts, in two languages;
- ``cli``: the command ``twinkeel ui``.
"""
