"""Steps of data parallel ranks: packs that are trained at the same time, alike in cost and kind."""
