"""Output for people: the report of an output, and previews of packs.

In data order: `report` (the verb, and its figures); `preview` (packs as they are trained),
`preview_text`; `pages` (of both, from `templates/`).
"""
