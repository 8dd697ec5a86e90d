"""Output for people: the report of an output, and previews of packs.

In data order: `complete_stages`, `figures`, `report` (the verb); `preview` (packs as they are
trained), `preview_text`; `pages` (of both, from `templates/`).
"""
