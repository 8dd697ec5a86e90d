"""The stage `measure`: source to index. Reads headers of media, decodes none."""
