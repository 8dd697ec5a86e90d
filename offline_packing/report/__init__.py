"""What people look at: the report of an output, previews of packs, pictures.

In data order: `generations` (what is complete), `sample_figures`, `pack_figures`, `set_aside`,
`document` (report.json), `charts`, `sample_sections`, `pack_sections`, `report_page`, `report` (the
verb); `preview` (packs as they are trained), `preview_text`, `preview_page`; `markup`, `tables` and
`page.html` for both pages.
"""
