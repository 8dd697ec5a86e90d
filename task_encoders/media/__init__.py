"""Media files: their size and frames without decoding them, and their patches.

In data order: `image`; `video_file` (frames of a file) and `video` (which frames); `patches` of
both. May import: samples.
"""
