"""What the page ``live`` shows.

- ``door``: which controller, and its token; ``panels``: what ``GET /status`` says, again and again;
- ``tables``, ``answers``, ``predicted``, ``chains``, ``waterfall``: tiers and outcomes; how far
  answers can be trusted; steps against the profile; a chain, by name and as a picture;
- ``fleet``, ``slots``, ``cards``: a map of it; what runs where; cards and slices;
- ``needs``, ``found``: why a panel is empty; what else the admin API offers;
- ``html``: small tables that do not flicker.
"""
