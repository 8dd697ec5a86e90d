"""Output for people: the report of an output, previews of packs, pictures.

In data order: `complete_stages`, `sample_figures`, `pack_figures`, `set_aside` (with
`distributions`), `document` (report.json), `pages` (its page and that of previews, from
`templates/`), `report` (the verb); `preview` (packs as they are trained), `preview_text`;
`pack_picture`.
"""
